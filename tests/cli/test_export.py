"""`peagle export`: one command, and the folder is a head for every verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny.folders import write_head

from .fakes import Shell

AUX_LAYERS = (2, 3, 4)  # vLLM wants them increasing
LAYOUTS = ("vllm", "speculators")


@pytest.fixture(scope="module")
def exportable(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("heads") / "p-eagle"
    return str(write_head(folder, Path(model), aux_hidden_state_layer_ids=AUX_LAYERS))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exported_head_is_evaluated_like_the_original(
    layout: str, command: Shell, exportable: str, data: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    arguments = ("export", exportable, "--to", layout, out, "--mask-token-id", "7", "--json")
    assert command(*arguments) == 0
    assert command.json["mask_token_id"] == 7
    assert command.json["path"] == out
    results = []
    for head in (exportable, out):
        assert command("evaluate", head, "--data", data, "--device", "cpu", "--json") == 0
        results.append({k: v for k, v in command.json.items() if k not in ("head", "provenance")})
    assert results[0] == results[1]


def test_a_full_folder_is_kept_unless_forced(
    command: Shell, exportable: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    arguments = ("export", exportable, "--to", "vllm", out, "--mask-token-id", "7")
    assert command(*arguments) == 0
    assert command(*arguments) == 2
    assert "is not empty" in command.err
    assert "--force" in command.err
    assert command(*arguments, "--force") == 0


@pytest.mark.parametrize("place", ["file/out", "/proc/foo"])
def test_a_place_that_cannot_be_written_is_one_line(
    place: str, command: Shell, exportable: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("export", exportable, "--to", "vllm", str(tmp_path / place))
    assert command(*arguments, "--mask-token-id", "7") == 2
    error, hint = command.err.splitlines()
    assert error.startswith(f"error: cannot write to {tmp_path / place}: ")
    assert hint == "hint: check the path"


def test_a_head_that_names_no_target_asks_for_one(
    command: Shell, exportable: str, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("export", exportable, "--to", "vllm", str(out), "--mask-token-id", "7")
    assert command(*arguments) == 0
    config = json.loads((out / "config.json").read_text())
    del config["peagle"]
    (out / "config.json").write_text(json.dumps(config))
    again = ("export", str(out), "--to", "speculators", str(tmp_path / "again"))
    assert command(*again) == 2
    assert "--model" in command.err
    assert command(*again, "--model", model) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("/missing", "--to", "vllm", "OUT"), "no head '/missing'"),
        (("HEAD", "--to", "gguf", "OUT"), "gguf"),
        (("HEAD", "OUT"), "--to"),
        (("HEAD", "--to", "vllm", "OUT", "--model", "/missing"), "/missing"),
        (("HEAD", "--to", "vllm", "OUT", "--mask-token-id", "999999"), "999999"),
    ],
)
def test_a_users_mistake_is_one_line(
    arguments: tuple[str, ...], named: str, command: Shell, exportable: str, tmp_path: Path
) -> None:
    places = {"HEAD": exportable, "OUT": str(tmp_path / "out")}
    assert command("export", *(places.get(word, word) for word in arguments)) == 2
    assert named in command.err
    assert not (tmp_path / "out").exists()

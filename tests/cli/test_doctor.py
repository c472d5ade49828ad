"""`peagle doctor`: each silent loss is found, and healthy data is called healthy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from peagle.data.dataset import Dataset, DatasetWriter, Row, read_manifest
from peagle.doctor import template_frame
from tests.tiny.families import ADAPTED, FAMILIES
from tests.tiny.folders import byte_tokenizer, write_head, write_model

from .fakes import Shell

OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def levels(shell: Shell) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in shell.json}


def rewrite(data: str, folder: Path, change: Any = None, **made_by: Any) -> str:
    """The dataset with every row and its manifest changed."""
    source = Dataset(Path(data))
    manifest = read_manifest(Path(data))["made_by"] | made_by
    writer = DatasetWriter(folder, {k: v for k, v in manifest.items() if v != "absent"})
    for index in range(len(source)):
        row = source[index]
        tokens, mask = row.token_ids.tolist(), row.loss_mask.tolist()
        fields = {"id": row.id, "token_ids": tokens, "loss_mask": mask}
        writer.add(Row(**fields | (change(tokens, mask) if change else {})))
    writer.flush()
    return str(folder)


def test_healthy_data_has_no_errors(command: Shell, model: str, data: str) -> None:
    assert command("doctor", "--data", data, "--model", model, "--json") == 0
    found = levels(command)
    for check in ("tokenizer", "chat template", "row start", "answer start", "mask", "token ids"):
        assert found[check] == "ok", check
    assert "share of the loss per depth" in command.out


@pytest.mark.parametrize(
    ("check", "level", "change", "made_by"),
    [
        ("chat template", "error", None, {"chat_template": "0123"}),
        ("chat template", "warning", None, {"chat_template": None}),
        ("chat template", "warning", None, {"chat_template": "absent"}),
        ("tokenizer", "error", None, {"tokenizer": "0123"}),
        ("target", "warning", None, {"target": "another"}),
        ("mask on prompts", "error", lambda t, m: {"loss_mask": [1] * len(t)}, {}),
        ("answer start", "error", lambda t, m: {"loss_mask": [1] * len(t)}, {}),
        ("row start", "error", lambda t, m: {"token_ids": [65] * len(t)}, {}),
        ("token ids", "error", lambda t, m: {"token_ids": [9999] * len(t)}, {}),
        ("clipped", "warning", lambda t, m: {"clipped": True}, {}),
        ("loops", "warning", lambda t, m: {"looping": True}, {}),
        ("data", "error", lambda t, m: {"loss_mask": [0] * len(t)}, {}),
        (
            "loss shares",
            "warning",
            lambda t, m: {"loss_mask": [int(i % 3 == 0 and i > 3) for i in range(len(t))]},
            {},
        ),
    ],
)
def test_what_is_wrong_with_data_is_found(
    check: str,
    level: str,
    change: Any,
    made_by: dict[str, Any],
    command: Shell,
    model: str,
    data: str,
    tmp_path: Path,
) -> None:
    broken = rewrite(data, tmp_path, change, **made_by)
    code = command("doctor", "--data", broken, "--model", model, "--json")
    assert levels(command)[check] == level
    assert code == int("error" in levels(command).values())
    assert all(f["hint"] for f in command.json if f["level"] != "ok")


def test_a_template_of_the_target_that_changed_is_found(
    command: Shell, data: str, tmp_path: Path
) -> None:
    other = write_model(tmp_path, OTHER_TEMPLATE)
    assert command("doctor", "--data", data, "--model", str(other), "--json") == 1
    assert levels(command)["chat template"] == "error"


def examine_head(command: Shell, folder: Path, model: str, data: str, **changes: Any) -> Any:
    head = write_head(folder, Path(model), **changes)
    command("doctor", "--data", data, "--model", model, "--head", str(head), "--json")
    return levels(command)


def test_the_frame_is_what_all_templated_prompts_share() -> None:
    tokenizer = byte_tokenizer()
    start, end = template_frame(tokenizer)
    assert tokenizer.decode(start) == "<|"
    assert tokenizer.decode(end) == "\n<|assistant|>"


def test_an_untrained_head_is_found_by_its_acceptance(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    found = examine_head(command, tmp_path / "head", model, data)
    assert found["fit"] == found["layer ids"] == found["head's context"] == found["mask id"] == "ok"
    assert found["draft vocabulary"] == "ok"
    assert found["acceptance"] in ("error", "warning")


def test_what_is_wrong_with_a_head_is_found(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    row = Dataset(Path(data))[0]
    found = examine_head(
        command,
        tmp_path / "head",
        model,
        data,
        aux_hidden_state_layer_ids=(1, 2, 3),
        max_position_embeddings=64,
        draft_vocab_size=40,
        mask_token_id=int(row.token_ids[3]),
        target_model="another",
    )
    assert found["layer ids"] == found["head's context"] == "warning"
    assert found["head's target"] == "warning"
    assert found["mask id"] == found["draft vocabulary"] == "error"


def test_d2t_out_of_range_is_a_finding(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", Path(model), draft_vocab_size=40)
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][-1] = 10**6
    save_file(tensors, head / "model.safetensors")
    assert command("doctor", "--model", model, "--head", str(head), "--json") == 1
    (error,) = (f for f in command.json if f["level"] == "error")
    assert "d2t" in error["message"]


def test_a_head_that_does_not_fit_is_a_finding(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    found = examine_head(command, tmp_path / "head", model, data, target_hidden_size=64)
    assert found["head"] == "error"
    assert command.code == 1


def test_a_users_error_is_one_line(command: Shell, model: str, data: str) -> None:
    assert command("doctor", "--model", model) == 2
    assert "nothing to examine" in command.err
    assert command("doctor", "--model", "/missing", "--data", data) == 2


def test_findings_are_lines(command: Shell, model: str, tmp_path: Path) -> None:
    assert command("doctor", "--model", model, "--data", str(tmp_path)) == 1
    assert command.out.startswith("error    data: ")
    assert "hint: run `peagle prepare`" in command.out


def configs_of(folder: Path, *sources: str) -> list[str]:
    """Copies of the folders' config.json alone."""
    copies = []
    for number, source in enumerate(sources):
        copy = folder / str(number)
        copy.mkdir()
        (copy / "config.json").write_text((Path(source) / "config.json").read_text())
        copies.append(str(copy))
    return copies


def test_two_configs_alone_say_what_fits_and_what_it_needs(
    command: Shell, model: str, head: str, tmp_path: Path
) -> None:
    target, drafter = configs_of(tmp_path, model, head)
    assert command("doctor", drafter, "--model", target, "--json") == 0
    found = {finding["check"]: finding for finding in command.json}
    assert "llama is native and runs by the fused kernels" in found["target"]["message"]
    assert "p-eagle, 3 draft tokens unless told, 4 at most" in found["drafts"]["message"]
    assert "KiB of cache for each token" in found["memory"]["message"]
    assert found["fit"]["level"] == "ok"


@pytest.mark.parametrize(
    ("name", "level", "message"),
    [
        ("gpt-oss", "ok", "gpt_oss is native and runs by its modules"),
        ("gpt2", "warning", "gpt2 runs by transformers' modules, slower"),
    ],
)
def test_a_head_for_another_target_does_not_fit(
    name: str, level: str, message: str, command: Shell, head: str, tmp_path: Path
) -> None:
    (FAMILIES | ADAPTED)[name]().save_pretrained(tmp_path / "target")
    assert command("doctor", head, "--model", str(tmp_path / "target"), "--json") == 1
    found = {finding["check"]: finding for finding in command.json}
    assert found["fit"]["level"] == "error"
    assert "vocabulary" in found["fit"]["message"]
    assert found["target"]["level"] == level
    assert message in found["target"]["message"]


def test_data_of_another_reasoning_mode_is_found(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    model = str(shutil.copytree(model, tmp_path / "thinking"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += (
        "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    )
    tokenizer.save_pretrained(model)
    mode = {"enable_thinking": False}
    other = rewrite(data, tmp_path / "data", chat_template_kwargs=mode)
    command("doctor", "--data", other, "--model", model, "--json")
    assert levels(command)["reasoning mode"] == "warning"
    given = ("--chat-template-kwargs", '{"enable_thinking": false}')
    command("doctor", "--data", other, "--model", model, *given, "--json")
    assert levels(command)["reasoning mode"] == "ok"

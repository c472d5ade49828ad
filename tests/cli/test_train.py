"""`peagle train`: from data to a head, forecasts, and one line for whatever is wrong."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from peagle.data.dataset import Dataset, DatasetWriter, Row
from peagle.files import held_folder
from peagle.train.trainer import Trainer
from tests.tiny.folders import write_head

from .fakes import Shell


@pytest.fixture
def recipe(model: str, data: str, tmp_path: Path) -> Path:
    """JSON is YAML."""
    options: dict[str, Any] = {
        "target": {"model": model},
        "head": {
            "num_hidden_layers": 2,
            "max_speculative_tokens": 3,
            "num_speculative_tokens": 2,
        },
        "data": {"path": data, "tokens_per_row": 96, "held_out_share": 0.2},
        "loss": {"chunk_rows": 64},
        "schedule": {"steps": 3},
        "run": {"folder": str(tmp_path / "run"), "device": "cpu", "log_every": 1},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(options))
    return file


def fails(command: Shell, recipe: Path, *overrides: str) -> str:
    """The one line of the error; the second is a hint."""
    assert command("train", str(recipe), *overrides) == 2
    lines = command.err.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    return command.err


@pytest.mark.slow
def test_a_run_shows_progress_and_ends_with_its_head(
    command: Shell, recipe: Path, tmp_path: Path
) -> None:
    assert command("train", str(recipe)) == 0
    assert command.out.startswith(f"{tmp_path / 'run' / 'head'}: best at step ")
    assert "of 3, acceptance length" in command.out
    assert "step 1 (33%" in command.err
    assert "step 3 (100%" in command.err
    assert "tokens/s" in command.err
    assert (tmp_path / "run" / "head" / "config.json").is_file()
    assert command("train", str(recipe)) == 2
    assert "already holds a run" in command.err
    assert command("train", str(recipe), "schedule.steps=4", "--resume", "--json") == 0
    assert command.json["step"] == 4
    assert command.json["head"] == str(tmp_path / "run" / "head")
    assert len(command.out.splitlines()) == 1


def test_the_dry_run_computes_measures_and_leaves_no_trace(
    command: Shell, recipe: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert command("train", str(recipe), "--dry-run", "run.device=auto") == 0
    assert sorted(tmp_path.rglob("*")) == before
    for part in ("target's weights", "AdamW's moments", "activations of", "loss of 64 rows"):
        assert part in command.out
    for part in ("computed", "measured", "minutes in steps", "tokens/s", "disk at most"):
        assert part in command.out
    assert command("train", str(recipe), "--dry-run", "run.device=auto", "--json") == 0
    assert len(command.out.splitlines()) == 1
    memory = command.json["memory"]
    assert memory["cuda"]["num_gpus"] == 1  # computed without a GPU at hand
    assert memory["cuda"]["total_gib"] > 0
    assert command.json["forecast_steps"] == 3


@pytest.mark.slow
def test_the_dry_run_computes_for_gpus_that_are_not_here(command: Shell, recipe: Path) -> None:
    moments = {}
    for gpus in ("1", "4"):
        options = ("--gpus", gpus, "run.device=auto", "run.sharding=fsdp2", "--json")
        assert command("train", str(recipe), "--dry-run", *options) == 0
        moments[gpus] = command.json["memory"]["cuda"]["parts_bytes"]["AdamW's moments"]
    assert moments["4"] == moments["1"] // 4
    assert "each of 4 GPUs" in command.err


def test_a_typo_names_the_nearest_key(command: Shell, recipe: Path) -> None:
    message = fails(command, recipe, "optimizer.learning_rat=1e-4")
    assert "unknown key 'learning_rat' in optimizer" in message
    assert "did you mean 'learning_rate'?" in message
    assert "did you mean 'schedule'?" in fails(command, recipe, "shedule.steps=3")


def test_missing_data_is_named_before_the_target_is_loaded(
    command: Shell, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("peagle.train.setup.load_target", never)
    message = fails(command, recipe, "data.path=/nowhere/at/all")
    assert "/nowhere/at/all is not a prepared dataset" in message
    assert "peagle prepare" in message


def test_data_without_supervised_tokens_is_refused(
    command: Shell, recipe: Path, data: str, tmp_path: Path
) -> None:
    rows, writer = Dataset(Path(data)), DatasetWriter(tmp_path / "unmasked", {"target": "tiny"})
    for index in range(len(rows)):
        tokens = rows[index].token_ids
        writer.add(Row(f"row-{index}", tokens, [0] * len(tokens)))
    writer.flush()
    message = fails(command, recipe, f"data.path={tmp_path / 'unmasked'}")
    assert "no token of" in message
    assert "is supervised" in message
    # Supervised tokens that the rows' length cuts off are as good as none.
    assert "no token to learn from" in fails(command, recipe, "data.tokens_per_row=4")


def test_data_of_another_tokenizer_is_refused(command: Shell, recipe: Path, tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "foreign", {"target": "tiny"})
    for index in range(8):
        writer.add(Row(f"row-{index}", [5, 6, 99999, 7], [0, 1, 1, 1]))
    writer.flush()
    message = fails(command, recipe, f"data.path={tmp_path / 'foreign'}")
    assert "has token 99999" in message


def test_a_head_and_a_target_that_do_not_fit_are_refused(
    command: Shell, recipe: Path, model: str, tmp_path: Path
) -> None:
    message = fails(command, recipe, "head.aux_hidden_state_layer_ids=[2, 3, 99]")
    assert "aux_hidden_state_layer_ids=[2, 3, 99] is out of range" in message
    other = write_head(tmp_path / "other", Path(model), target_hidden_size=64)
    message = fails(command, recipe, f"head.start_from={other}")
    assert "hidden size 64 but the target has" in message
    narrow = write_head(tmp_path / "narrow", Path(model), draft_vocab_size=40)
    message = fails(command, recipe, f"head.start_from={narrow}")
    assert "draft_vocab_size 40, not" in message


def test_a_folder_that_another_process_writes_to_is_refused(
    command: Shell, recipe: Path, tmp_path: Path
) -> None:
    with held_folder(tmp_path / "run"):
        assert "another process is writing to" in fails(command, recipe)


def test_nothing_to_resume_is_said_before_the_target_is_loaded(
    command: Shell, recipe: Path, tmp_path: Path
) -> None:
    message = fails(command, recipe, "target.model=/missing/model", "--resume")
    assert "has no checkpoint to resume from" in message
    assert "leave out --resume" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_says_how_to_go_on(
    command: Shell, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, code: int,
) -> None:  # fmt: skip
    whole_step = Trainer.step

    def step(self: Trainer, *arguments: Any) -> None:
        whole_step(self, *arguments)
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert command("train", str(recipe)) == code
    assert f"interrupted: {tmp_path / 'run'} keeps step 1" in command.err
    assert "--resume" in command.err
    assert command("train", str(recipe), "--resume", "--json") == 0
    assert command.json["step"] == 3


@pytest.mark.slow
def test_a_run_that_nobody_can_judge_is_warned_of(
    command: Shell, recipe: Path, data: str, tmp_path: Path
) -> None:
    manifest = json.loads((Path(data) / "manifest.json").read_text())
    shutil.copytree(data, tmp_path / "foreign")
    manifest["made_by"]["target"] = "another-model"
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps(manifest))
    overrides = ("data.held_out_share=0", f"data.path={tmp_path / 'foreign'}")
    assert command("train", str(recipe), *overrides, "--json") == 0
    assert "none of the 8 rows is held out at data.held_out_share=0.0" in command.err
    assert "are another-model's, not" in command.err
    assert (command.json["best"], command.json["best_step"]) == (None, None)


def test_a_folder_is_not_a_recipe(command: Shell, tmp_path: Path) -> None:
    assert "Is a directory" in fails(command, tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.device=gpu", "run.device='gpu' is unknown"),
        ("target.model=/missing/model", "/missing/model"),
        ("head.start_from=/missing/head", "/missing/head"),
        ("head.num_speculative_tokens=9", "num_speculative_tokens 9 is out of range"),
    ],
)
def test_other_mistakes_are_one_line(
    override: str, message: str, command: Shell, recipe: Path
) -> None:
    assert command("train", str(recipe), override) == 2
    error, hint = command.err.splitlines()
    assert message in error
    assert hint.startswith("hint: ")


def test_the_config_is_printed_whole(command: Shell, recipe: Path) -> None:
    assert command("train", str(recipe), "--print-config", "run.seed=7") == 0
    assert "# Longer gradients are scaled down to it. [float > 0]\n" in command.out
    printed = yaml.safe_load(command.out)
    assert printed["run"]["seed"] == 7
    assert printed["optimizer"]["max_grad_norm"] == 1.0
    assert command("train", str(recipe), "--print-config", "run.seed=7", "--json") == 0
    assert command.json == printed

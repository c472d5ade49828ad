"""What a run leaves in its folder, and a word where plots are missing."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.teacher_forcing.partition import Shapes
from peagle.train.journal import METRICS, Journal, curves_of, draw_curves, read_metrics
from peagle.train.loop import TrainingRun
from peagle.train.setup import Setup, assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    training.write_dataset(tmp_path / "data", training.counting_language(40, 24))
    return tmp_path


def setup(folder: Path, **run: Any) -> Setup:
    return assemble(training.recipe(folder, run=run), DEEP.make_target(torch.float32), ROPE)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in names else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_a_run_without_plot_packages_works_and_says_so(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "tensorboard", "matplotlib")
    reported: list[str] = []
    TrainingRun(setup(data, log_every=2), report=reported.append)()
    assert reported[0] == (
        "not written: TensorBoard files and curves.png; tensorboard and matplotlib missing: "
        "pip install 'peagle[plots]'"
    )
    assert any("loss" in line and "tokens/s" in line for line in reported)
    assert any("acceptance length by K" in line for line in reported)
    files = {path.name for path in (data / "run").iterdir()}
    assert files == {"recipe.json", "provenance.json", METRICS, "checkpoints", "head"}


@pytest.mark.slow
def test_curves_are_a_picture(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    hide(monkeypatch, "tensorboard")
    TrainingRun(setup(data, log_every=1, evaluate_every=2))()
    picture = (data / "run" / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_tensorboard_shows_the_numbers_of_the_metrics(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hide(monkeypatch, "matplotlib")
    TrainingRun(setup(data, log_every=1))()
    board = EventAccumulator(str(data / "run" / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("train/loss")]
    lines = [line for line in read_metrics(data / "run") if line["kind"] == "train"]
    assert shown == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert "acceptance_length/K=1" in board.Tags()["scalars"]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_a_resumed_run_has_each_step_once_in_its_metrics(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": step} for step in (1, 2, 3)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"ki')
    Journal(tmp_path, from_step=2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.slow
def test_cut_elements_are_counted_and_warned_of_once(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = setup(data, log_every=1)
    made.batches.plan.shapes = Shapes(max_masks=20)  # far below what is drawn
    with caplog.at_level(logging.WARNING, logger="peagle.train.loop"):
        TrainingRun(made)()
    lines = [line for line in read_metrics(data / "run") if line["kind"] == "train"]
    assert all(line["num_cut"] > 0 for line in lines)
    assert sum("do not fit the padded rows" in m for m in caplog.messages) == 1


@pytest.mark.slow
def test_nothing_is_cut_where_nothing_is_padded(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="peagle.train.loop"):
        TrainingRun(setup(data, log_every=1))()
    lines = [line for line in read_metrics(data / "run") if line["kind"] == "train"]
    assert [line["num_cut"] for line in lines] == [0] * len(lines)
    assert not caplog.messages


def test_curves_count_positions_from_1_and_leave_out_what_was_not_evaluated(tmp_path: Path) -> None:
    train = [{"kind": "train", "step": n, "loss": 9.0 - n, "accuracy": [0.5, 0.25]} for n in (1, 2)]
    found = curves_of(train)
    assert found["accuracy"] == {"draft 1": [(1, 0.5), (2, 0.5)], "draft 2": [(1, 0.25), (2, 0.25)]}
    assert found["acceptance length"] == {}
    draw_curves(train, tmp_path / "two.png")
    evaluated = {"kind": "evaluate", "step": 2, "all": {"acceptance_length": [1.5, 1.9]}}
    draw_curves([*train, evaluated], tmp_path / "three.png")
    widths = [int.from_bytes((tmp_path / f"{n}.png").read_bytes()[16:20]) for n in ("two", "three")]
    assert widths == [1200, 1800], "a panel for each kind of figure that there is"
    draw_curves([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()

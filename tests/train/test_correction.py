"""A correction learns beside a head that stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.checkpoints.heads.loading import load_head, save_head
from peagle.errors import ConfigError, HeadError
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.teacher_forcing.draft_model import DraftModel
from peagle.train.loop import TrainingRun
from peagle.train.setup import Setup, assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

LEARNS = {"optimizer": {"learning_rate": 2e-2}, "loss": {"kind": "ce"}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language that a head can learn, a head that has begun to, and a correction for it."""
    folder = tmp_path_factory.mktemp("runs")
    training.write_dataset(folder / "data", training.counting_language(60, 24))
    head = {"schedule": {"steps": 60}, "run": run_in(folder, "head")}
    TrainingRun(assemble(training.recipe(folder, **LEARNS, **head), DEEP.make_target(), ROPE))()
    TrainingRun(correction_run(folder, "correction"))()
    return folder


def run_in(folder: Path, name: str) -> dict[str, Any]:
    return {"folder": str(folder / name)}


def correction_run(folder: Path, name: str, **sections: Any) -> Setup:
    head = {"start_from": str(folder / "head" / "head"), "correction_size": 24}
    sections = {"schedule": {"steps": 40}, **LEARNS, **sections}
    sections["run"] = run_in(folder, name) | sections.get("run", {})
    recipe = training.recipe(folder, **{"head": head, **sections})
    return assemble(recipe, DEEP.make_target(), ROPE)


def loaded(folder: Path, target: TargetModel) -> EagleNetwork:
    return load_head(str(folder), target, dtype=torch.float64, device=torch.device("cpu"))


def test_the_correction_learns_and_the_head_stays_as_it_is(data: Path) -> None:
    evaluator = correction_run(data, "unused").evaluator
    assert evaluator is not None
    target = DEEP.make_target()
    without, with_it = (
        evaluator(DraftModel(loaded(data / name / "head", target)))
        for name in ("head", "correction")
    )
    assert with_it.acceptance_length(1) == without.acceptance_length(1)
    assert with_it.acceptance_length(4) > without.acceptance_length(4) + 0.03
    old, new = data / "head" / "head", data / "correction" / "head"
    theirs, ours = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    network = loaded(new, DEEP.make_target())
    assert network.correction is not None
    assert network.correction.down_proj.weight.any()


def test_a_resumed_run_ends_where_an_undisturbed_one_does(data: Path) -> None:
    short: dict[str, Any] = {"schedule": {"steps": 12}}
    TrainingRun(correction_run(data, "whole", **short))()
    often = {"run": {"checkpoint_every": 4}, **short}
    stopped = correction_run(data, "parts", **often)
    stop_after(9, stopped)
    with pytest.raises(KeyboardInterrupt):
        TrainingRun(stopped)()
    progress = TrainingRun(correction_run(data, "parts", **often), resume=True)()
    assert progress.step == 12
    whole, parts = (
        load_file(data / name / "head" / "correction.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def stop_after(count: int, setup: Setup) -> None:
    """The run is interrupted once it has taken so many steps."""
    step, taken = setup.trainer.step, []

    def stopping(*arguments: Any) -> None:
        if len(taken) == count:
            raise KeyboardInterrupt
        taken.append(step(*arguments))

    setup.trainer.step = stopping  # type: ignore[method-assign]


def test_a_correction_goes_on_from_where_it_is(data: Path) -> None:
    head = {"start_from": str(data / "correction" / "head"), "correction_size": 24}
    network = correction_run(data, "more", head=head).network
    stored = load_file(data / "correction" / "head" / "correction.safetensors")
    assert network.correction is not None
    for name, weight in network.correction.named_parameters():
        assert torch.equal(weight, stored[f"correction.{name}"].to(weight.dtype))
    with pytest.raises(ConfigError, match="a correction of size 24, not 25"):
        correction_run(data, "more", head=head | {"correction_size": 25})


def test_a_head_that_learns_on_loses_its_correction(data: Path) -> None:
    head = {"start_from": str(data / "correction" / "head")}
    network = correction_run(data, "more", head=head).network
    assert network.correction is None
    assert network.config.correction_size is None


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"correction_size": 0, "start_from": "x"}, "correction_size"),
        ({"correction_size": 8}, "for an existing p-eagle head"),
        ({"correction_size": 8, "start_from": "x", "method": "eagle3"}, "p-eagle"),
    ],
)
def test_a_correction_without_a_head_is_refused(
    head: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        training.recipe(tmp_path, head=head)


def test_a_correction_for_another_head_is_refused(tmp_path: Path) -> None:
    target = DEEP.make_target()
    for name, seed in (("one", 1), ("other", 2)):
        save_head(DEEP.make_head(target, seed=seed, correction_size=8), tmp_path / name)
    (tmp_path / "one" / "correction.safetensors").replace(
        tmp_path / "other" / "correction.safetensors"
    )
    with pytest.raises(HeadError, match="trained on another head"):
        loaded(tmp_path / "other", target)
    with pytest.raises(HeadError, match=r"correction\.safetensors"):
        loaded(tmp_path / "one", target)


def test_rounding_a_head_keeps_its_correction(tmp_path: Path) -> None:
    target = DEEP.make_target()
    save_head(DEEP.make_head(target, correction_size=8), tmp_path / "h", dtype=torch.bfloat16)
    network = loaded(tmp_path / "h", target)
    save_head(network, tmp_path / "wide")
    assert loaded(tmp_path / "wide", target).correction is not None

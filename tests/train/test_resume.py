"""A run survives kills, damage and a loss that is no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peagle.errors import TrainingError
from peagle.train.loop import Run
from peagle.train.run_state import restore_newest
from peagle.train.setup import Setup, assemble
from train import tiny


@pytest.fixture
def data(tmp_path: Path) -> Path:
    tiny.write_dataset(tmp_path / "data", tiny.counting_language(40, 24))
    return tmp_path


def setup(folder: Path, name: str, **sections: dict[str, Any]) -> Setup:
    run = {"folder": str(folder / name)} | sections.pop("run", {})
    recipe = tiny.recipe(folder, run={"checkpoint_every": 2, **run}, **sections)
    return assemble(recipe, tiny.target(torch.float32), tiny.ROPE)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    files = [load_file(newest / f"{part}.safetensors") for part in ("network", "optimizer")]
    return files[0] | files[1]


class Killed(BaseException):
    pass


def kill_after(run: Run, steps: int) -> None:
    trainer = run.setup.trainer
    whole_step = trainer.step

    def step(*arguments: Any) -> None:
        if run.progress.step == steps:
            raise Killed
        whole_step(*arguments)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run()


def test_a_killed_and_resumed_run_ends_bit_equal(data: Path) -> None:
    # Seven packed rows an epoch, two a step: the kill falls into the middle of the second.
    options: dict[str, Any] = {"schedule": {"steps": 9}, "data": {"rows_per_step": 2}}
    Run(setup(data, "whole", **options))()
    kill_after(Run(setup(data, "killed", **options)), 5)
    resumed = Run(setup(data, "killed", **options), resume=True)
    assert resumed.progress.step == 4
    resumed()
    whole, killed = final_weights(data / "whole"), final_weights(data / "killed")
    assert whole.keys() == killed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, killed[name]), name


@pytest.mark.parametrize("damage", ["cut", "missing", "state"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(data: Path, damage: str) -> None:
    Run(setup(data, "run"))()
    newest = sorted((data / "run" / "checkpoints").glob("step-*"))[-1]
    if damage == "cut":
        content = (newest / "network.safetensors").read_bytes()
        (newest / "network.safetensors").write_bytes(content[:-4])
    elif damage == "missing":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "state.json").write_text("{")
    fresh = setup(data, "run")
    progress = restore_newest(data / "run" / "checkpoints", fresh.network, fresh.trainer.optimizer)
    assert progress is not None
    assert progress.step == 2


def test_a_run_is_not_overwritten_by_accident(data: Path) -> None:
    Run(setup(data, "run"))()
    with pytest.raises(TrainingError, match="already holds a run"):
        Run(setup(data, "run"))


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(data: Path) -> None:
    run = Run(setup(data, "run", schedule={"steps": 20}))
    trainer = run.setup.trainer
    whole_step = trainer.step

    def step(*arguments: Any) -> None:
        if run.progress.step == 5:
            with torch.no_grad():
                run.setup.network.fc.weight.fill_(float("nan"))
        whole_step(*arguments)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="the loss is nan"):
        run()
    assert final_weights(data / "run")["fc.weight"].isfinite().all()
    assert Run(setup(data, "run"), resume=True).progress.step == 4


def test_the_head_with_the_longest_acceptance_is_kept(data: Path) -> None:
    run = Run(setup(data, "run", run={"evaluate_every": 1}))
    lengths = iter([1.2, 1.9, 1.4, 1.1, 1.0])

    class Fixed:
        def acceptance_length(self, k: int) -> float:
            return next(lengths)

        def as_dict(self) -> dict[str, Any]:
            return {"all": {"acceptance_length": []}}

    run.setup.evaluator = lambda model: Fixed()  # type: ignore[assignment]
    kept: list[torch.Tensor] = []
    whole_step = run.setup.trainer.step

    def step(*arguments: Any) -> None:
        whole_step(*arguments)
        kept.append(run.setup.network.fc.weight.detach().clone())

    run.setup.trainer.step = step  # type: ignore[method-assign]
    progress = run()
    assert (progress.best, progress.best_step) == (1.9, 2)
    saved = load_file(data / "run" / "head" / "model.safetensors")["fc.weight"]
    assert torch.equal(saved, kept[1])

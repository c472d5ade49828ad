"""A run survives kills, damage and a loss that is not finite."""

from __future__ import annotations

import errno
import multiprocessing
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.errors import OutputError, TrainingError
from peagle.processes import Terminated
from peagle.train import run_folder as run_state
from peagle.train.journal import read_metrics
from peagle.train.loop import TrainingRun
from peagle.train.run_folder import restore_newest
from peagle.train.setup import Setup, assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    training.write_dataset(tmp_path / "data", training.counting_language(40, 24))
    return tmp_path


def setup(folder: Path, name: str, **sections: dict[str, Any]) -> Setup:
    run = {"folder": str(folder / name)} | sections.pop("run", {})
    recipe = training.recipe(folder, run={"checkpoint_every": 2, **run}, **sections)
    return assemble(recipe, DEEP.make_target(torch.float32), ROPE)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    files = [load_file(newest / f"{part}.safetensors") for part in ("network", "optimizer")]
    return files[0] | files[1]


class Killed(BaseException):
    pass


def kill_after(run: TrainingRun, steps: int) -> None:
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
    options: dict[str, Any] = {
        "schedule": {"steps": 9},
        "data": {"rows_per_step": 2},
        "loss": {"kind": "tv", "weighting": "acceptance"},
    }
    TrainingRun(setup(data, "whole", **options))()
    kill_after(TrainingRun(setup(data, "killed", **options)), 5)
    resumed = TrainingRun(setup(data, "killed", **options), resume=True)
    assert resumed.progress.step == 4
    resumed()
    whole, killed = final_weights(data / "whole"), final_weights(data / "killed")
    assert whole.keys() == killed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, killed[name]), name


def test_a_resumed_optimiser_is_the_one_that_was_saved(data: Path) -> None:
    run = TrainingRun(setup(data, "run"))
    run()
    again = setup(data, "run")
    restore_newest(run.folder.checkpoints, again.network, again.trainer.optimizer)
    restored = dict(again.network.named_parameters())
    for name, parameter in run.setup.network.named_parameters():
        saved = run.setup.trainer.optimizer.state[parameter]
        found = again.trainer.optimizer.state[restored[name]]
        assert set(saved) == set(found) == {"step", "exp_avg", "exp_avg_sq"}
        assert int(found["step"]) == 4, name  # bias correction goes on, and does not begin again
        assert all(torch.equal(found[key], value) for key, value in saved.items()), name


def train_in_a_process(folder: Path) -> None:
    torch.set_num_threads(1)
    begun = any((folder / "killed" / "checkpoints").glob("step-*"))
    TrainingRun(
        setup(folder, "killed", schedule={"steps": 12}, run={"checkpoint_every": 1}), resume=begun
    )()


def test_a_run_that_is_killed_again_and_again_ends_bit_equal(data: Path) -> None:
    began = time.monotonic()
    TrainingRun(setup(data, "whole", schedule={"steps": 12}, run={"checkpoint_every": 1}))()
    longest = time.monotonic() - began
    moments, context = random.Random(0), multiprocessing.get_context("fork")
    for _ in range(5):  # SIGKILL: nothing in the process can clean up
        process = context.Process(target=train_in_a_process, args=(data,))
        process.start()
        process.join(moments.uniform(0.0, longest))
        process.kill()
        process.join()
    train_in_a_process(data)
    whole, killed = final_weights(data / "whole"), final_weights(data / "killed")
    assert all(torch.equal(weight, killed[name]) for name, weight in whole.items())
    names = {path.name for path in (data / "killed" / "checkpoints").iterdir()}
    assert names == {"step-00000011", "step-00000012"}  # nothing half written stays
    steps = [line["step"] for line in read_metrics(data / "killed") if line["kind"] == "train"]
    assert steps == sorted(set(steps))


def full_disk(after: int) -> Any:
    """A `save_file` that finds the disk full from its `after`-th call on, in the middle of one."""
    calls = iter(range(10**6))

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if next(calls) >= after:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    return save


def test_a_full_disk_is_one_clear_error_and_the_last_good_state_stays(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"schedule": {"steps": 6}}
    TrainingRun(setup(data, "whole", **options))()
    # The second checkpoint's second file: weights are written, moments are not.
    monkeypatch.setattr(run_state, "save_file", full_disk(after=3))
    with pytest.raises(OutputError, match="No space left on device") as caught:
        TrainingRun(setup(data, "full", **options))()
    assert "--resume" in (caught.value.hint or "")
    names = [path.name for path in (data / "full" / "checkpoints").iterdir()]
    assert names == ["step-00000002"]
    monkeypatch.undo()
    resumed = TrainingRun(setup(data, "full", **options), resume=True)
    assert resumed.progress.step == 2
    resumed()
    whole, full = final_weights(data / "whole"), final_weights(data / "full")
    assert all(torch.equal(weight, full[name]) for name, weight in whole.items())


def test_a_full_disk_keeps_the_best_head(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TrainingRun(setup(data, "run"))()
    before = (data / "run" / "head" / "model.safetensors").read_bytes()
    run = TrainingRun(setup(data, "run", schedule={"steps": 6}), resume=True)
    run.progress = run.progress._replace(best=0.0)
    monkeypatch.setattr("peagle.checkpoints.heads.loading.save_file", full_disk(after=0))
    with pytest.raises(OutputError, match="No space left on device"):
        run()
    assert (data / "run" / "head" / "model.safetensors").read_bytes() == before


def test_a_checkpoint_of_other_sizes_is_refused(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    (data / "run" / "recipe.json").unlink()  # which would say so first
    with pytest.raises(TrainingError, match="of other sizes than this recipe's"):
        TrainingRun(setup(data, "run", head={"num_hidden_layers": 3}), resume=True)


def test_a_damaged_checkpoint_never_outlives_the_good_ones(data: Path) -> None:
    """With one kept, the damaged later one must go and not the good one before it."""
    TrainingRun(setup(data, "run"))()
    newest = sorted((data / "run" / "checkpoints").glob("step-*"))[-1]
    (newest / "state.json").write_text("{")
    options = {"keep_checkpoints": 1, "checkpoint_every": 3}
    kill_after(TrainingRun(setup(data, "run", run=options), resume=True), 3)
    assert [p.name for p in (data / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_what_a_kill_left_half_written_goes_when_the_run_resumes(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    leftover = data / "run" / "checkpoints" / ".step-00000003.0123.tmp"
    leftover.mkdir()
    TrainingRun(setup(data, "run"), resume=True)
    assert not leftover.exists()


def test_a_head_that_a_kill_took_is_written_again(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    (data / "run" / "head").rename(data / "run" / ".head.0123.tmp")  # between two renames
    TrainingRun(setup(data, "run"), resume=True)()
    assert (data / "run" / "head" / "config.json").is_file()


@pytest.mark.parametrize("damage", ["cut", "missing", "state"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(data: Path, damage: str) -> None:
    TrainingRun(setup(data, "run"))()
    newest = sorted((data / "run" / "checkpoints").glob("step-*"))[-1]
    if damage == "cut":
        content = (newest / "network.safetensors").read_bytes()
        (newest / "network.safetensors").write_bytes(content[:-4])
    elif damage == "missing":
        (newest / "optimizer.safetensors").unlink()
    else:
        (newest / "state.json").write_text("{")
    fresh = setup(data, "run")
    state = restore_newest(data / "run" / "checkpoints", fresh.network, fresh.trainer.optimizer)
    assert state["progress"]["step"] == 2


@pytest.mark.parametrize("checkpoint_every", [2, 3])  # with one of the last step, and without
def test_a_run_that_is_complete_is_not_evaluated_again(data: Path, checkpoint_every: int) -> None:
    options = {"checkpoint_every": checkpoint_every}
    TrainingRun(setup(data, "run", run=options))()
    before = content(data / "run")
    TrainingRun(setup(data, "run", run=options), resume=True)()
    after = content(data / "run")
    changed = {
        path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    }
    assert changed <= {"provenance.json", "curves.png"}


def test_a_run_is_not_overwritten_by_accident(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    with pytest.raises(TrainingError, match="already holds a run"):
        TrainingRun(setup(data, "run"))


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_without_a_readable_checkpoint_nothing_is_resumed_or_touched(
    data: Path, damage: str
) -> None:
    TrainingRun(setup(data, "run"))()
    for state in (data / "run" / "checkpoints").glob("step-*/state.json"):
        state.write_text("{") if damage == "damaged" else shutil.rmtree(state.parent)
    before = content(data / "run")
    message = "can be read" if damage == "damaged" else "no checkpoint to resume from"
    with pytest.raises(TrainingError, match=message):
        TrainingRun(setup(data, "run"), resume=True)
    assert content(data / "run") == before


def test_a_head_whose_checkpoints_are_gone_is_not_overwritten(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    shutil.rmtree(data / "run" / "checkpoints")
    before = content(data / "run")
    with pytest.raises(TrainingError, match="already holds a head"):
        TrainingRun(setup(data, "run"))
    assert content(data / "run") == before


def test_a_resumed_run_names_every_key_that_changed(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    before = content(data / "run")
    changed = {"optimizer": {"weight_decay": 0.5}, "cod": {"retention": 0.5}, "run": {"seed": 3}}
    with pytest.raises(TrainingError) as caught:
        TrainingRun(setup(data, "run", **changed), resume=True)
    assert caught.value.message == (
        f"{data / 'run'} was started with another recipe: "
        "cod.retention: 0.8 -> 0.5; optimizer.weight_decay: 0.0 -> 0.5; run.seed: 0 -> 3"
    )
    assert "head.start_from=" in str(caught.value.hint)
    assert content(data / "run") == before


def test_keys_that_may_change_are_named_as_well(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    reported: list[str] = []
    options: dict[str, Any] = {"schedule": {"steps": 6}, "optimizer": {"learning_rate": 1e-3}}
    TrainingRun(setup(data, "run", **options), resume=True, report=reported.append)
    assert "resumed with another value of optimizer.learning_rate: 0.01 -> 0.001" in reported
    assert "resumed with another value of schedule.steps: 4 -> 6" in reported


def test_data_may_move_but_not_change(data: Path) -> None:
    TrainingRun(setup(data, "run"))()
    (data / "data").rename(data / "moved")
    options: dict[str, Any] = {"data": {"path": str(data / "moved")}}
    assert TrainingRun(setup(data, "run", **options), resume=True).progress.step == 4
    training.write_dataset(data / "other", training.counting_language(41, 24))
    with pytest.raises(TrainingError, match="rows 40 -> 41"):
        TrainingRun(setup(data, "run", data={"path": str(data / "other")}), resume=True)


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)]
)
def test_a_signal_ends_the_step_saves_it_and_interrupts(
    data: Path, number: int, raised: type[BaseException]
) -> None:
    options: dict[str, Any] = {"schedule": {"steps": 6}, "run": {"checkpoint_every": 100}}
    TrainingRun(setup(data, "whole", **options))()
    run = TrainingRun(setup(data, "run", **options))
    whole_step = run.setup.trainer.step

    def step(*arguments: Any) -> None:
        if run.progress.step == 2:
            signal.raise_signal(number)
        whole_step(*arguments)

    run.setup.trainer.step = step  # type: ignore[method-assign]
    handler = signal.getsignal(number)
    with pytest.raises(raised) as caught:
        run()
    assert caught.type is raised
    assert run.saved_step == 3
    assert signal.getsignal(number) is handler
    TrainingRun(setup(data, "run", **options), resume=True)()
    whole, stopped = final_weights(data / "whole"), final_weights(data / "run")
    assert all(torch.equal(weight, stopped[name]) for name, weight in whole.items())


def test_a_second_signal_does_not_wait_for_the_step(data: Path) -> None:
    run = TrainingRun(setup(data, "run"))

    def step(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the step went on")

    run.setup.trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run()
    assert run.saved_step == 0


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(data: Path) -> None:
    run = TrainingRun(setup(data, "run", schedule={"steps": 20}))
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
    assert TrainingRun(setup(data, "run"), resume=True).progress.step == 4


def test_the_head_with_the_longest_acceptance_is_kept(data: Path) -> None:
    run = TrainingRun(setup(data, "run", run={"evaluate_every": 1}))
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

"""Two processes train what one process trains."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from peagle.processes import Terminated
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

pytestmark = pytest.mark.slow

STEPS = 3
UNEVEN = 46  # rows of a segment: then packed rows have unlike numbers of segments


def train(
    folder: Path, name: str, *, max_rows: int | None = None, **sections: dict[str, Any]
) -> None:
    run = {"folder": str(folder / name), "partitions": 2} | sections.pop("run", {})
    recipe = training.recipe(folder, run=run, schedule={"steps": STEPS}, **sections)
    setup = assemble(recipe, DEEP.make_target(), ROPE)
    setup.batches.plan.max_rows = max_rows
    TrainingRun(setup)()


def stop_one(rank: int, folder: Path) -> None:
    """SIGTERM reaches the second process alone, in its first step."""
    run = {"folder": str(folder / "stopped"), "log_every": 1}
    recipe = training.recipe(folder, run=run, schedule={"steps": STEPS})
    stopped = TrainingRun(assemble(recipe, DEEP.make_target(), ROPE))
    trainer = stopped.setup.trainer
    whole_step = trainer.step

    def step(*arguments: Any) -> None:
        whole_step(*arguments)
        if rank == 1:
            signal.raise_signal(signal.SIGTERM)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(Terminated):
        stopped()


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=2),  # a deadlock is a failure, not a wait
    )
    try:
        for sharding in ("ddp", "fsdp2"):
            train(folder, sharding, run={"sharding": sharding})
        train(folder, "uneven", run={"sharding": "fsdp2"}, max_rows=UNEVEN)
        stop_one(rank, folder)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    training.write_dataset(folder / "data", training.counting_language(60, 24))
    train(folder, "one", data={"rows_per_step": 2})
    mp.spawn(process, args=(folder,), nprocs=2)
    return folder


def test_unlike_numbers_of_segments_really_occur(runs: Path) -> None:
    batches = assemble(training.recipe(runs), DEEP.make_target(), ROPE).batches
    batches.plan.max_rows = UNEVEN
    rows = batches.rows_from(0)
    numbers = [len(next(rows).segments) for _ in range(2 * STEPS)]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    assert any(first != second for first, second in pairs)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2", "uneven"])
@pytest.mark.parametrize("part", ["network", "optimizer"])
def test_two_processes_end_with_the_weights_of_one(runs: Path, sharding: str, part: str) -> None:
    file = f"checkpoints/step-{STEPS:08d}/{part}.safetensors"
    one, two = load_file(runs / "one" / file), load_file(runs / sharding / file)
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_the_saved_head_is_whole(runs: Path, sharding: str) -> None:
    one = load_file(runs / "one" / "head" / "model.safetensors")
    two = load_file(runs / sharding / "head" / "model.safetensors")
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-9, rtol=1e-7, msg=name)


def test_processes_stop_after_the_same_step_and_save_it(runs: Path) -> None:
    """Both ended, or `runs` would have met its timeout."""
    names = [path.name for path in (runs / "stopped" / "checkpoints").iterdir()]
    assert names == ["step-00000001"]

"""What a run will cost, measured on its first rows: `peagle train --dry-run`."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from peagle.progress import track
from peagle.teacher_forcing.attention import attention_for
from peagle.train.batches import Prefetch
from peagle.train.planner import PlannedRow
from peagle.train.recipe import Recipe
from peagle.train.setup import Setup
from peagle.train.trainer import Metrics

WARM_UP_STEPS = 3  # the first compiles, the next fill the allocator's pools


class Measured(NamedTuple):
    metrics: Metrics
    seconds: float
    waited: float  # for rows
    warm_up: float
    last: PlannedRow


def forecast(setup: Setup, total_steps: int, num_steps: int = 10) -> dict[str, Any]:
    """Runs a few steps with a learning rate of 0. The run's folder is not touched."""
    trainer, device = setup.trainer, setup.trainer.device
    measured = run_steps(setup, num_steps)
    per_step = measured.seconds / num_steps
    row, fetched = measured.last.row, measured.last.fetched
    segment = measured.last.segments[0].to(device)
    window = trainer.model.network.config.sliding_window
    return {
        "seconds_per_step": per_step,
        "tokens_per_second": measured.metrics.tokens / measured.seconds,
        "loss_rows_per_step": measured.metrics.loss_rows / num_steps,
        "rows_per_pass": len(segment.positions),
        "elements_cut_per_row": measured.last.num_cut,
        "waiting_share": measured.waited / measured.seconds,
        "warm_up_seconds": measured.warm_up,
        "target_seconds": _seconds(lambda: trainer.source(row, fetched), device),
        "mask_seconds": _seconds(
            lambda: attention_for(segment.elements, segment.positions, (window,)), device
        ),
        "peak_memory_gib": _peak_memory(device),
        **run_length(setup.recipe, total_steps, per_step),
        **disk_use(setup),
    }


def run_steps(setup: Setup, num_steps: int) -> Measured:
    trainer, data = setup.trainer, setup.recipe.data
    rows, pin = setup.batches.rows_from(0), trainer.device.type == "cuda"
    prefetch = Prefetch(rows, data.prefetch, pin=pin)
    try:
        with track("measuring", WARM_UP_STEPS + num_steps, "steps") as work:
            began = time.monotonic()
            for _ in range(WARM_UP_STEPS):
                trainer.step([next(prefetch) for _ in range(data.rows_per_step)], 0.0)
                work.advance()
            trainer.take_metrics()
            waited, warm = 0.0, time.monotonic()
            for _ in range(num_steps):
                before = time.monotonic()
                planned = [next(prefetch) for _ in range(data.rows_per_step)]
                waited += time.monotonic() - before
                trainer.step(planned, 0.0)
                work.advance()
        metrics = trainer.take_metrics()
        return Measured(metrics, time.monotonic() - warm, waited, warm - began, planned[0])
    finally:
        prefetch.close()


def run_length(recipe: Recipe, total_steps: int, seconds_per_step: float) -> dict[str, Any]:
    """Steps and minutes of the whole run; evaluations and checkpoints come on top."""
    minutes = recipe.schedule.minutes
    if minutes is None:
        minutes = seconds_per_step * total_steps / 60
    steps = total_steps or int(minutes * 60 / seconds_per_step)
    return {"forecast_steps": steps, "forecast_minutes": minutes}


def disk_use(setup: Setup) -> dict[str, float]:
    """GiB of the run's folder at its fullest: a new checkpoint stands beside those that stay."""
    weights = sum(p.numel() * p.itemsize for p in setup.network.parameters())
    checkpoints = 3 * weights * (setup.recipe.run.keep_checkpoints + 1)
    folder = Path(setup.recipe.run.folder).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return {"disk_gib": (checkpoints + 2 * weights) / 2**30, "disk_free_gib": free / 2**30}


def _seconds(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    work()
    _synchronise(device)
    began = time.monotonic()
    for _ in range(repeats):
        work()
    _synchronise(device)
    return (time.monotonic() - began) / repeats


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(device: torch.device) -> float:
    """The peak of the GPU's tensors; on a CPU that of the whole process with its libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30

"""What a run will cost, measured on its first rows: `peagle train --dry-run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from peagle.train.attention import attention_for
from peagle.train.batches import Prefetch
from peagle.train.setup import Setup

WARM_UP_STEPS = 3  # the first compiles, the next fill the allocator's pools


def forecast(setup: Setup, total_steps: int, num_steps: int = 10) -> dict[str, Any]:
    """Runs a few steps with a learning rate of 0. The run's folder is not touched."""
    trainer, device = setup.trainer, setup.trainer.device
    per_step = setup.recipe.data.rows_per_step
    rows = setup.batches.rows_from(0)
    prefetch = Prefetch(rows, setup.recipe.data.prefetch, pin=device.type == "cuda")
    began = time.monotonic()
    for _ in range(WARM_UP_STEPS):
        trainer.step([next(prefetch) for _ in range(per_step)], 0.0)
    trainer.take_metrics()
    warm_up = time.monotonic() - began

    waited, began = 0.0, time.monotonic()
    for _ in range(num_steps):
        before = time.monotonic()
        planned = [next(prefetch) for _ in range(per_step)]
        waited += time.monotonic() - before
        trainer.step(planned, 0.0)
    metrics = trainer.take_metrics()
    seconds = time.monotonic() - began
    prefetch.close()

    row, fetched = planned[0].row, planned[0].fetched
    segment = planned[0].segments[0].to(device)
    return {
        "seconds_per_step": seconds / num_steps,
        "tokens_per_second": metrics.tokens / seconds,
        "charged_rows_per_step": metrics.charged / num_steps,
        "rows_per_pass": len(segment.positions),
        "elements_cut_per_row": planned[0].num_cut,
        "waiting_share": waited / seconds,
        "warm_up_seconds": warm_up,
        "target_seconds": _seconds(lambda: trainer.source(row, fetched), device),
        "mask_seconds": _seconds(
            lambda: attention_for(segment.elements, segment.positions), device
        ),
        "peak_memory_gib": _peak_memory(device),
        "forecast_minutes": seconds / num_steps * total_steps / 60 if total_steps else None,
    }


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


def _peak_memory(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None

"""Which of few shapes a batch is filled up to, so that few graphs serve all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from peagle.engine.lanes.choosing import Sampling
from peagle.sampling_params import SamplingParams

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)  # each includes the one before it


def batch_size(count: int) -> int:
    """The smallest of BATCH_SIZES that holds them; beyond, multiples of the largest."""
    largest = BATCH_SIZES[-1]
    if count > largest:
        return -(-count // largest) * largest
    return next(size for size in BATCH_SIZES if size >= count)


def padded(num_items: int) -> int:
    """The next power of two, or three quarters of it: at most a third of the items are for
    nothing."""
    power = 1 << (num_items - 1).bit_length()
    return power // 4 * 3 if power >= 4 and num_items <= power // 4 * 3 else power


def sampling_of(params: Iterable[SamplingParams]) -> Sampling:
    """What a step must be able to do for requests with these."""
    drawn = [p for p in params if not p.greedy]
    if not drawn:
        return "greedy"
    filtered = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in drawn)
    return "filtered" if filtered else "sampled"

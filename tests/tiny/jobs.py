"""Requests that tests make of an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from peagle.sampling_params import SamplingParams

from .models import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Job(NamedTuple):
    """A request and the step at which it joins."""

    prompt: list[int]
    params: SamplingParams
    joins: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()
    eos: tuple[int, ...] = ()


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]

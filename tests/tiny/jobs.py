"""Requests that tests make of an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from peagle.engine.grammar import Grammar, GrammarCompiler
from peagle.sampling_params import SamplingParams

from .folders import byte_tokenizer
from .models import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


class Job(NamedTuple):
    """A request and the step at which it joins."""

    prompt: list[int]
    params: SamplingParams
    joins: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()
    eos: tuple[int, ...] = ()


@cache
def grammars() -> GrammarCompiler:
    """Over the tokens of the tiny tokenizer, for targets that have as many."""
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer), frozenset([tokenizer.eos_token_id]))


def grammar_of(params: SamplingParams) -> Grammar | None:
    wanted = params.structured_outputs
    return None if wanted is None else grammars().compile(wanted)


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]

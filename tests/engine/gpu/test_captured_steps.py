"""Claim: a step captured as a CUDA graph says what the plain step says on a CPU.

float32 on both: only a near tie, of two logits or of a coin, could tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.steps import DecodeShape

from peagle.sampling_params import SamplingParams

from .. import tiny
from ..lanes.lane_tiny import check_same, idle
from ..lanes.test_rejection_law import LENGTH, check_law
from ..test_sampled_law import SMALL_VOCAB
from ..tiny import Job
from .captured import BATCH, HEADS, K, captured_engine, decode_shapes, models, plain_engine

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = [
    SamplingParams(seed=1, max_tokens=14),
    GREEDY,
    SamplingParams(seed=2, temperature=1.4, max_tokens=9),
]
FILTERED = [
    SamplingParams(seed=3, top_k=9, temperature=0.8, max_tokens=14),
    SamplingParams(seed=4, top_p=0.8, temperature=1.4, max_tokens=12),
    GREEDY,
    SamplingParams(seed=5, min_p=0.1, max_tokens=12),
]
LONG_PROMPT = [1 + n % 37 for n in range(150)]  # ten prefill steps; its attention is divided


@pytest.fixture(scope="module")
def engine_with() -> Callable[[str], LaneEngine]:
    """One engine for each head: each graph is captured once for all tests."""
    return cache(lambda name: captured_engine(*models("cuda", HEADS[name]), "rejection"))


def jobs_of(params: list[SamplingParams], count: int = 12) -> list[Job]:
    """They come one by one, and more than there are lanes."""
    texts = tiny.prompts(count, seed=1, longest=24)
    return [Job(p, params[n % len(params)], joins=n) for n, p in enumerate(texts)]


def check_captured(engine: LaneEngine, name: str, jobs: list[Job]) -> int:
    """Same tokens, endings and counters as the plain step's; nobody took that step here.
    -> how many drafts were accepted"""
    requests = check_same(engine, plain_engine(name, "rejection"), jobs)
    assert idle(engine)
    assert engine.stats.draft_time == 0.0
    assert {shape.batch for shape in decode_shapes(engine)} == {BATCH}
    return sum(request.stats.num_accepted_tokens for request in requests)


@pytest.mark.parametrize("name", HEADS)
def test_greedy_steps_give_plain_decodings_answers(
    name: str, engine_with: Callable[[str], LaneEngine]
) -> None:
    engine = engine_with(name)
    assert check_captured(engine, name, jobs_of([GREEDY])) > 0
    assert DecodeShape(BATCH, K, "greedy", num_splits=1) in decode_shapes(engine)


def test_greedy_steps_with_divided_attention_give_plain_decodings_answers(
    engine_with: Callable[[str], LaneEngine],
) -> None:
    engine = engine_with("p-eagle")
    check_captured(engine, "p-eagle", [*jobs_of([GREEDY], count=3), Job(LONG_PROMPT, GREEDY)])
    assert max(shape.num_splits for shape in decode_shapes(engine)) > 1


def test_steps_without_drafts_beside_prompts_give_plain_decodings_answers(
    engine_with: Callable[[str], LaneEngine],
) -> None:
    engine = engine_with("p-eagle")
    params = dataclasses.replace(GREEDY, num_speculative_tokens=0)
    check_captured(engine, "p-eagle", jobs_of([params], count=24))
    assert 0 in {shape.depth for shape in decode_shapes(engine)}


@pytest.mark.parametrize("kind", ["sampled", "filtered"])
@pytest.mark.parametrize("name", HEADS)
def test_rejection_gives_the_plain_steps_tokens(
    name: str, kind: str, engine_with: Callable[[str], LaneEngine]
) -> None:
    engine = engine_with(name)
    assert check_captured(engine, name, jobs_of(SAMPLED if kind == "sampled" else FILTERED)) > 0
    assert (K, kind, True) in {(s.depth, s.sampling, s.by_rejection) for s in decode_shapes(engine)}


def test_rejection_has_the_targets_law() -> None:
    head = HEADS["p-eagle"] | {"draft_vocab_size": SMALL_VOCAB - 1}
    engine = captured_engine(*models("cuda", head, vocab_size=SMALL_VOCAB), "rejection")
    check_law(engine, SamplingParams(max_tokens=LENGTH + 1, temperature=1.3), samples=300)
    assert any(shape.by_rejection for shape in decode_shapes(engine))

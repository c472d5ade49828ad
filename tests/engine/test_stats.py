"""Statistics reconcile with the tokens that came out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW

PROMPTS = prompts(4, seed=9)
LONG = SamplingParams(temperature=0.0, max_tokens=24)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(torch.float64)


@cache
def known() -> list[list[int]]:
    return [p + naive.answer(target(), Job(p, LONG)) for p in PROMPTS]


def drafter_named(name: str, seed: int) -> Drafter:
    if name == "host":
        return drafters.mixed(known(), seed)
    return drafters.ScriptedHead(SHALLOW.make_head(target(), name), drafters.Script(known(), seed))


def counters(stats: SpecDecodeStats) -> dict[str, Any]:
    return {k: v for k, v in vars(stats).items() if not k.endswith("_time")}


def check_sums(stats: SpecDecodeStats) -> None:
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert sum(stats.num_draft_tokens_per_pos) == stats.num_draft_tokens
    rows = zip(
        stats.num_draft_tokens_per_pos,
        stats.num_reached_tokens_per_pos,
        stats.num_accepted_tokens_per_pos,
        strict=True,
    )
    assert all(drafted >= reached >= accepted for drafted, reached, accepted in rows)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.integers(1, 10),
    st.lists(
        st.tuples(st.integers(1, 24), st.lists(st.integers(0, 39), max_size=3)),
        min_size=4,
        max_size=4,
    ),
    st.integers(0, 50),
    st.sampled_from(["host", "p-eagle", "eagle3"]),
    st.booleans(),
)
def test_tokens_out_are_steps_plus_accepted_up_to_trimming(
    k: int, shapes: list[tuple[int, list[int]]], seed: int, drafter: str, static: bool
) -> None:
    jobs = [
        Job(p, SamplingParams(temperature=0.0, max_tokens=length, stop_token_ids=stops), joins=n)
        for n, (p, (length, stops)) in enumerate(zip(PROMPTS, shapes, strict=True))
    ]
    engine = engines.make_engine(
        target(), drafter_named(drafter, seed), k, max_num_batched_tokens=16, static=static
    )
    requests = engines.run(engine, jobs)
    total = SpecDecodeStats()
    for request in requests:
        stats = request.stats
        assert stats.num_output_tokens == request.num_outputs
        untrimmed = stats.num_steps + stats.num_accepted_tokens
        if request.finish_reason == "length":  # drafts are never asked for beyond the length
            assert stats.num_output_tokens == untrimmed
        else:
            assert untrimmed - k <= stats.num_output_tokens <= untrimmed
        check_sums(stats)
        total.merge(stats)
    assert counters(total) == counters(engine.stats)
    check_sums(engine.stats)


@both_forms
@pytest.mark.parametrize("k", [1, 3, 7])
def test_an_oracles_mean_acceptance_length_is_k_plus_1(k: int, static: bool) -> None:
    tokens = 1 + 4 * (k + 1)  # one from the prefill, then four full steps
    job = Job(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=tokens))
    answer = PROMPTS[0] + naive.answer(target(), job)
    engine = engines.make_engine(target(), drafters.oracle([answer]), k, static=static)
    engines.run(engine, [job])
    assert engine.stats.mean_acceptance_length == k + 1
    assert engine.stats.per_position_acceptance == [1.0] * k
    assert engine.stats.num_drafts == 4
    assert engine.stats.num_steps == 5


@both_forms
@pytest.mark.parametrize("drafter", ["host", "p-eagle"])
def test_times_are_shared_out_among_the_requests(drafter: str, static: bool) -> None:
    engine = engines.make_engine(target(), drafter_named(drafter, 0), 4, static=static)
    requests = engines.run(engine, [Job(p, LONG, joins=n) for n, p in enumerate(PROMPTS)])
    for name in ("draft_time", "verify_time"):
        shares = [getattr(r.stats, name) for r in requests]
        assert all(share > 0 for share in shares)
        # One that joins while a step is in flight has a share of it, too.
        rel = 0.4 if static and drafter != "host" else 1e-6
        assert sum(shares) == pytest.approx(getattr(engine.stats, name), rel=rel)

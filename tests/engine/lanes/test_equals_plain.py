"""Claim: lanes give the plain engine's tokens and counters, and the naive answer."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import Job
from .lane_tiny import (
    Script,
    ScriptedHead,
    check_naive,
    check_same,
    known,
    lane_drafts,
    lane_engine,
    scripted_engine,
)

HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 1},
    "p-eagle, 2 layers": {"num_hidden_layers": 2},
    "p-eagle, reduced vocabulary": {"num_hidden_layers": 2, "draft_vocab_size": 15},
    "eagle3": {"method": "eagle3"},
    "eagle3, reduced vocabulary": {"method": "eagle3", "draft_vocab_size": 15},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True, "has_lm_head": True},
}
MODES: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0, max_tokens=14)],
    "sampled": [SamplingParams(seed=3, max_tokens=14)],
    "filtered": [SamplingParams(seed=5, temperature=0.8, top_k=9, top_p=0.9, max_tokens=14)],
    "mixed": [
        SamplingParams(temperature=0.0, max_tokens=14),
        SamplingParams(seed=1, max_tokens=9),
        SamplingParams(seed=2, min_p=0.1, max_tokens=12),
        SamplingParams(seed=2, top_p=0.8, temperature=1.4, max_tokens=12),
    ],
}


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(name: str) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), **HEADS[name]))


def jobs_of(mode: str, seed: int = 0, count: int = 4) -> list[Job]:
    params, texts = MODES[mode], tiny.prompts(count, seed, longest=24)
    return [Job(p, params[n % len(params)], joins=n) for n, p in enumerate(texts)]


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding(mode: str) -> None:
    jobs = jobs_of(mode)
    requests = check_same(lane_engine(target()), tiny.make_engine(target()), jobs)
    check_naive(target(), requests, jobs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_of_real_heads(name: str, mode: str) -> None:
    k = 1 + list(HEADS).index(name) % 3 * 3  # 1, 4, 7
    jobs = jobs_of(mode)
    lanes, plain = lane_engine(target(), head(name), k), tiny.make_engine(target(), head(name), k)
    requests = check_same(lanes, plain, jobs)
    check_naive(target(), requests, jobs)
    assert lanes.stats.num_draft_tokens > 20


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("name", ["p-eagle, 2 layers", "eagle3"])
def test_drafts_of_every_fate(name: str, k: int) -> None:
    """None, some and all of a step's drafts accepted, in turn."""
    jobs = jobs_of("mixed", seed=k)
    script = Script(known(target(), jobs), seed=k)
    lanes = scripted_engine(target(), head(name), script, k)
    plain = tiny.make_engine(target(), ScriptedHead(head(name), script), k)
    requests = check_same(lanes, plain, jobs)
    check_naive(target(), requests, jobs)
    assert 0.1 < lanes.stats.acceptance_rate < 0.9


@pytest.mark.parametrize("name", ["p-eagle, 2 layers", "eagle3"])
def test_requests_that_want_fewer_more_or_no_drafts(name: str) -> None:
    depths = (0, 2, 16, None, 5, 17)  # the lanes hold 16, 17 takes the plain step
    depths = depths if name == "eagle3" else depths[:-1]  # this P-EAGLE head drafts no more
    jobs = [
        job._replace(params=dataclasses.replace(job.params, num_speculative_tokens=depth))
        for job, depth in zip(jobs_of("mixed", seed=4, count=len(depths)), depths, strict=True)
    ]
    script = Script(known(target(), jobs))
    lanes = scripted_engine(target(), head(name), script, 3)
    # The script speaks for lanes alone, so no plain request may meet it.
    plain = tiny.make_engine(target(), ScriptedHead(head(name), script), 3)
    ours = tiny.run(lanes, jobs)
    theirs = tiny.run(plain, jobs)
    check_naive(target(), ours, jobs)
    for mine, other, depth in zip(ours, theirs, depths, strict=True):
        if depth != 17:
            assert mine.stats.num_draft_tokens_per_pos == other.stats.num_draft_tokens_per_pos
            assert mine.stats.num_accepted_tokens == other.stats.num_accepted_tokens
    assert max(shape.depth for shape in lane_drafts(lanes).decode_shapes) == 16


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_depth_may_rise_and_fall_between_steps(name: str) -> None:
    """What a deep step left pending is read by a shallow one."""
    long, short = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 3))
    texts = tiny.prompts(6, seed=9)
    depths = [1, 7, 2, 7, 0, 5]
    jobs = [
        Job(
            text,
            dataclasses.replace(short if n else long, num_speculative_tokens=depth),
            joins=3 * n,
        )
        for n, (text, depth) in enumerate(zip(texts, depths, strict=True))
    ]
    script = Script(known(target(), jobs), seed=1)
    lanes = scripted_engine(target(), head(name), script, 4)
    plain = tiny.make_engine(target(), ScriptedHead(head(name), script), 4)
    check_naive(target(), check_same(lanes, plain, jobs), jobs)
    assert len({shape.depth for shape in lane_drafts(lanes).decode_shapes}) > 2


@st.composite
def workloads(draw: st.DrawFn) -> tuple[str, int, list[Job]]:
    rng = random.Random(draw(st.integers(0, 10**6)))
    jobs = []
    for n in range(draw(st.integers(1, 6))):
        mode = draw(st.sampled_from(list(MODES)))
        params = dataclasses.replace(
            rng.choice(MODES[mode]),
            seed=rng.randrange(2**63),
            max_tokens=rng.choice((1, 2, 3, 8, 15)),
            num_speculative_tokens=rng.choice((None, None, 0, 1, 3, 8)),
            stop_token_ids=tuple(rng.sample(range(tiny.VOCAB), rng.choice((0, 3)))),
        )
        prompt = [rng.randrange(tiny.VOCAB) for _ in range(rng.choice((1, 5, 16, 17, 32, 40)))]
        jobs.append(Job([n, *prompt][: len(prompt)], params, joins=rng.randrange(8)))
    return draw(st.sampled_from(list(HEADS))), draw(st.integers(1, 7)), jobs


@settings(max_examples=15, deadline=None)
@given(workloads(), st.integers(1, 8), st.sampled_from([1, 3, 4, 16]))
def test_any_workload(work: tuple[str, int, list[Job]], seqs: int, block_size: int) -> None:
    """More requests than lanes, too; whoever ends hands its lane on at once."""
    name, k, jobs = work
    script = Script(known(target(), jobs), seed=k)
    options = {"max_num_seqs": seqs, "block_size": block_size}
    lanes = scripted_engine(target(), head(name), script, k, **options)
    plain = tiny.make_engine(target(), ScriptedHead(head(name), script), k, **options)
    check_naive(target(), check_same(lanes, plain, jobs), jobs)

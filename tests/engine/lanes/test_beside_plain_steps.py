"""Requests that need the plain step share blocks with the lanes: all are served, all correctly."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import check_naive, counters, idle, lane_engine
from .test_preemption import LONGEST, room_for

SAMPLED = SamplingParams(seed=4, max_tokens=12, ignore_eos=True)
NEEDS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "minimum length": {"min_tokens": 6, "stop_token_ids": (3, 4, 5, 6, 7, 8)},
    "bias": {"logit_bias": {3: 4.0, 9: -4.0}},
}


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(method: str) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), method))


def mixed_jobs(seed: int = 0) -> list[Job]:
    """One of each need, a bad word, and a lane request after each."""
    texts = iter(tiny.prompts(12, seed=seed, longest=16))
    jobs = [Job(next(texts), GREEDY, bad_word_ids=[[5], [7, 8]])]
    for number, changes in enumerate(NEEDS.values()):
        base = SAMPLED if number % 2 else dataclasses.replace(GREEDY, max_tokens=12)
        jobs.append(Job(next(texts), dataclasses.replace(base, **changes), joins=number))
        jobs.append(Job(next(texts), base, joins=number))
    return jobs


@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
def test_both_kinds_in_one_engine(method: str) -> None:
    drafter = None if method == "none" else head(method)
    lanes, plain = lane_engine(target(), drafter, 3), tiny.make_engine(target(), drafter, 3)
    jobs = mixed_jobs()
    ours, theirs = tiny.run(lanes, jobs), tiny.run(plain, jobs)
    check_naive(target(), ours, jobs)
    assert counters(ours) == counters(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert [x.token_ids for x in mine.logprobs] == [x.token_ids for x in other.logprobs]
    assert idle(lanes)


def test_only_those_that_must_take_the_plain_step() -> None:
    engine = lane_engine(target(), head("p-eagle"), 3)
    jobs = mixed_jobs()
    for n, job in enumerate(jobs):
        engine.add_request(str(n), job.prompt, job.params, bad_word_ids=job.bad_word_ids)
    assert [r.request_id for r in engine.seating.waiting] == ["2", "4", "6", "8"]
    assert [r.request_id for r in engine.scheduler.waiting] == ["0", "1", "3", "5", "7"]


@pytest.mark.parametrize("spare", [0, 6, 25])
def test_both_kinds_come_through_when_blocks_are_short(spare: int) -> None:
    jobs = mixed_jobs(seed=2)
    options = room_for(LONGEST + spare, head("eagle3"))
    engine = lane_engine(target(), head("eagle3"), 3, block_size=1, **options)
    requests = tiny.run(engine, jobs)
    check_naive(target(), requests, jobs)
    assert sum(r.num_preemptions for r in requests) > 0
    assert idle(engine)


def test_a_stream_of_lane_requests_does_not_starve_one_that_needs_the_plain_step() -> None:
    """Three lanes that never end together leave too few blocks free at any time."""
    engine = lane_engine(target(), None, block_size=1, **room_for(66, None))
    lane_params = dataclasses.replace(GREEDY, max_tokens=12)
    patient = None
    for n in range(80):
        if n % 4 == 0:
            engine.add_request(str(n), [3] * 10, lane_params)
        if n == 12:
            params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=3)
            patient = engine.add_request("plain", [2] * 37, params)
        engine.step()
    assert patient is not None
    assert patient.num_outputs == 3

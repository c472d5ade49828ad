"""Requests whose callers go away, at any time: nothing is left behind, nobody else notices."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import at_lane, idle, lane_engine

LONG = [n % tiny.VOCAB for n in range(60)]


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(method: str) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), method))


@pytest.mark.parametrize("after", range(6))
def test_abort_before_during_and_after_prefill(after: int) -> None:
    """The prompt takes four steps; later there are steps in flight."""
    engine = lane_engine(target(), head("p-eagle"), 3, max_num_batched_tokens=16)
    request = engine.add_request("0", LONG, GREEDY)
    for _ in range(after):
        engine.step()
    engine.abort(request)
    assert request.finish_reason == "abort"
    assert idle(engine)
    said = request.output_token_ids
    assert engine.step() == []  # what was in flight is nobody's
    assert request.output_token_ids == said


def test_a_waiting_request_can_be_aborted() -> None:
    engine = lane_engine(target(), None, max_num_seqs=1)
    running, waiting = (engine.add_request(str(n), [1, 2], GREEDY) for n in range(2))
    engine.step()
    for _ in range(2):  # the second time does no harm
        engine.abort(waiting)
    while engine.has_unfinished:
        engine.step()
    assert running.output_token_ids == tiny.naive(target(), Job([1, 2], GREEDY))
    assert waiting.output_token_ids == []
    assert idle(engine)


def test_a_freed_lane_serves_the_next_request_while_old_steps_are_in_flight() -> None:
    engine = lane_engine(target(), head("eagle3"), 4, max_num_seqs=1)
    first = engine.add_request("0", [5, 6, 7], GREEDY)
    for _ in range(2):
        engine.step()
    seat = engine.seating.seat_of(first)
    assert seat is not None
    assert at_lane(engine, "in_flight", seat) == 1
    engine.abort(first)
    second = engine.add_request("1", [8, 9], GREEDY)
    engine.step()
    new_seat = engine.seating.seat_of(second)
    assert new_seat is not None
    assert new_seat.lane == seat.lane
    while engine.has_unfinished:
        engine.step()
    assert second.output_token_ids == tiny.naive(target(), Job([8, 9], GREEDY))


def test_nothing_is_unfinished_while_only_stale_steps_are_in_flight() -> None:
    engine = lane_engine(target(), head("p-eagle"), 4)
    request = engine.add_request("0", [5, 6, 7], GREEDY)
    engine.step()
    engine.abort(request)
    assert not engine.has_unfinished
    (again,) = tiny.run(engine, [Job([5, 6, 7], GREEDY)])
    assert again.output_token_ids == tiny.naive(target(), Job([5, 6, 7], GREEDY))


@settings(max_examples=15, deadline=None)
@given(
    aborts=st.dictionaries(st.integers(0, 4), st.integers(0, 9), max_size=5),
    seqs=st.integers(1, 4),
    method=st.sampled_from(["p-eagle", "eagle3"]),
)
def test_any_aborts(aborts: dict[int, int], seqs: int, method: str) -> None:
    """aborts: request -> the step before which it goes."""
    params = dataclasses.replace(GREEDY, max_tokens=7)
    jobs = [Job(p, params) for p in tiny.prompts(5, seed=1, longest=30)]
    engine = lane_engine(
        target(), head(method), 3, max_num_seqs=seqs, max_num_batched_tokens=16, block_size=2
    )
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    step = 0
    while engine.has_unfinished:
        for n, when in aborts.items():
            if when == step:
                engine.abort(requests[n])
        engine.step()
        step += 1
    for request, job in zip(requests, jobs, strict=True):
        expected = tiny.naive(target(), job)
        assert request.output_token_ids == expected[: request.num_outputs]
        if request.finish_reason != "abort":
            assert request.num_outputs == len(expected)
    assert idle(engine)

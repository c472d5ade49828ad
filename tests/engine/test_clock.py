"""What the device did and how long it waited, as told in statistics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from peagle.engine.clock import Clock, Shares, StepMarks
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats
from tests.tiny import engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

PAUSE = 0.2


@pytest.mark.slow
@both_forms
def test_time_between_two_runs_is_nobodys(static: bool) -> None:
    """A request that stops early leaves a step in flight, which the next run must not read."""
    target, prompt = SHALLOW.make_target(), prompts(1, seed=3)[0]
    whole = naive.answer(target, Job(prompt, SamplingParams(max_tokens=9, temperature=0)))
    stops = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[whole[3]])
    engine = engines.make_engine(target, static=static)
    for _ in range(2):
        (request,) = engines.run(engine, [Job(prompt, stops)])
        time.sleep(PAUSE)
    assert request.finish_reason == "stop"
    assert request.stats.other_time < PAUSE / 2
    assert engine.stats.other_time < PAUSE / 2


@both_forms
def test_no_time_is_counted_twice_where_some_requests_need_the_host(static: bool) -> None:
    target = SHALLOW.make_target()
    engine = engines.make_engine(target, head_drafter(SHALLOW.make_head(target)), 3, static=static)
    params = [SamplingParams(temperature=0, max_tokens=20, logprobs=n) for n in (None, 1)]
    began = time.perf_counter()
    engines.run(engine, [Job(p, params[n % 2]) for n, p in enumerate(prompts(4))])
    stats, elapsed = engine.stats, time.perf_counter() - began
    assert stats.draft_time + stats.verify_time + stats.other_time <= elapsed


class FakeMark:
    def __init__(self, at: float) -> None:
        self.at = at

    def since(self, earlier: FakeMark) -> float:
        return self.at - earlier.at


def marks(begun: float, verified: float | None, ended: float) -> StepMarks:
    at: list[Any] = [None if t is None else FakeMark(t) for t in (begun, verified, ended)]
    return StepMarks(*at)


def test_a_step_is_draft_verification_and_the_gap_before_it() -> None:
    totals = SpecDecodeStats()
    clock = Clock(totals)
    clock.count(marks(0, 2, 3), 2)  # nothing came before it: no gap
    clock.count(marks(4, 6, 9), 4)
    clock.count(marks(8.5, None, 11), 1)  # begun before the one ahead ended; one graph
    assert (totals.draft_time, totals.verify_time, totals.other_time) == (4, 6.5, 1)
    assert clock.shares == Shares(draft=0.5 + 0.75, verify=1 + 0.5 + 2.5, other=0.25)


def test_drafts_on_the_host_are_taken_from_the_gap() -> None:
    totals = SpecDecodeStats()
    clock = Clock(totals)
    clock.count(marks(0, 1, 1), 2)
    clock.count_draft(2, 2)
    clock.count(marks(4, 5, 5), 2)
    assert (totals.draft_time, totals.verify_time, totals.other_time) == (2, 2, 1)


def test_a_pause_is_no_gap() -> None:
    totals = SpecDecodeStats()
    clock = Clock(totals)
    clock.count(marks(0, 1, 2), 1)
    clock.pause()
    clock.count(marks(10, 11, 12), 1)
    assert totals.other_time == 0


def test_a_requests_times_are_the_shares_while_it_ran() -> None:
    stats, clock = SpecDecodeStats(), Clock(SpecDecodeStats())
    clock.count(marks(0, 1, 2), 1)
    began = clock.shares
    clock.count(marks(3, 5, 6), 2)
    clock.shares.add_to(stats, since=began)
    assert (stats.verify_time, stats.draft_time, stats.other_time) == pytest.approx((1, 0.5, 0.5))

"""What the device did and how long it waited, as told in statistics."""

from __future__ import annotations

import time

import pytest
from peagle.engine.lanes.clock import DeviceClock, Shares

from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

from .. import tiny
from ..tiny import Job
from .lane_tiny import lane_engine

PAUSE = 0.2


def test_time_between_two_runs_is_nobodys() -> None:
    """A request that stops early leaves a step in flight, which the next run must not read."""
    target, prompt = tiny.make_target(), tiny.prompts(1, seed=3)[0]
    whole = tiny.naive(target, Job(prompt, SamplingParams(max_tokens=9, temperature=0)))
    stops = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[whole[3]])
    engine = lane_engine(target)
    for _ in range(2):
        request = engine.add_request("0", prompt, stops)
        while engine.has_unfinished:
            engine.step()
        time.sleep(PAUSE)
    assert request.finish_reason == "stop"
    assert request.stats.other_time < PAUSE / 2
    assert engine.stats.other_time < PAUSE / 2


class FakeMark:
    def __init__(self, at: float) -> None:
        self.at = at

    def since(self, earlier: FakeMark) -> float:
        return self.at - earlier.at

    def later(self, other: FakeMark | None) -> FakeMark:
        return self if other is None or self.at > other.at else other


class FakeReport:
    def __init__(self, begun: float, ended: float) -> None:
        self.begun, self.ended = FakeMark(begun), FakeMark(ended)


def test_steps_side_by_side_are_counted_once_and_gaps_as_idle() -> None:
    totals = SpecDecodeStats()
    clock = DeviceClock(totals)
    steps = [FakeReport(0, 2), FakeReport(1, 1.5), FakeReport(1, 3), FakeReport(4, 5)]
    shares = [clock.count(step, 2) for step in steps]  # type: ignore[arg-type]
    assert (totals.verify_time, totals.other_time) == pytest.approx((4, 1))
    assert shares == [Shares(1, 0), Shares(0, 0), Shares(0.5, 0), Shares(0.5, 0.5)]


def test_a_requests_times_are_the_shares_while_it_ran() -> None:
    stats, clock = SpecDecodeStats(), DeviceClock(SpecDecodeStats())
    clock.advance(Shares(1, 1))
    began = clock.shares
    clock.advance(Shares(2, 0.5))
    clock.shares.add_to(stats, since=began)
    assert (stats.verify_time, stats.other_time) == (2, 0.5)

"""How long the device worked and waited, and what share of it is each request's."""

from __future__ import annotations

from typing import NamedTuple

from peagle.engine.lanes.graphs import Mark, Report
from peagle.speculation.statistics import SpecDecodeStats


class Shares(NamedTuple):
    """Seconds of all decode steps so far, each divided by its number of requests: so a request's
    own are the difference between two readings, and no step has to visit its requests."""

    busy: float = 0.0
    idle: float = 0.0

    def without(self, other: Shares) -> Shares:
        return Shares(self.busy - other.busy, self.idle - other.idle)

    def add_to(self, stats: SpecDecodeStats, since: Shares) -> None:
        own = self.without(since)
        stats.verify_time += own.busy
        stats.other_time += own.idle


class DeviceClock:
    """Draft and verification are one graph: their time is counted together. The rest is time in
    which the device had nothing to do."""

    def __init__(self, totals: SpecDecodeStats) -> None:
        self.shares = Shares()
        self._totals = totals
        self._last_ended: Mark | None = None  # of the step read last, while requests are running

    def count(self, report: Report, num_requests: int) -> Shares:
        """-> what each of its requests has of this step, which must have ended."""
        begun, ended, last = report.begun, report.ended, self._last_ended
        # A prefill step may have ended before a decode step that ran beside it.
        busy = max(ended.since(begun.later(last)), 0.0)
        idle = 0.0 if last is None else max(begun.since(last), 0.0)
        self._last_ended = ended.later(last)
        self._totals.verify_time += busy
        self._totals.other_time += idle
        share = max(num_requests, 1)
        return Shares(busy / share, idle / share)

    def advance(self, step: Shares) -> None:
        """After a decode step, before its requests are told: one that ends has its part."""
        self.shares = Shares(self.shares.busy + step.busy, self.shares.idle + step.idle)

    def pause(self) -> None:
        """Nothing is running: waiting for requests is not the device's idleness."""
        self._last_ended = None

"""How long the device worked and waited, and what share of it is each request's."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch

from peagle.speculation.statistics import SpecDecodeStats


class Mark:
    """A moment in what the device does; on the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._time = perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Mark) -> float:
        if self._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class StepMarks(NamedTuple):
    begun: Mark
    verified: Mark | None  # None where verification and draft are one graph
    ended: Mark


class Shares(NamedTuple):
    """Seconds of all steps so far, each divided by its number of requests: so a request's own
    are the difference between two readings, and no step has to visit its requests."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    def add_to(self, stats: SpecDecodeStats, since: Shares) -> None:
        stats.draft_time += self.draft - since.draft
        stats.verify_time += self.verify - since.verify
        stats.other_time += self.other - since.other


class Clock:
    """Where draft and verification are one graph, their time is counted together. The rest is
    time in which the device had nothing to do."""

    def __init__(self, totals: SpecDecodeStats) -> None:
        self.shares = Shares()
        self._totals = totals
        self._last_ended: Mark | None = None  # of the step read last, while requests are running

    def count(self, marks: StepMarks, num_requests: int) -> float:
        """A step that has ended, before its requests are told: one that ends has its part.
        -> seconds that it took, the host's work before it included, unless that was unusual."""
        begun, verified, ended = marks
        idle = 0.0 if self._last_ended is None else max(begun.since(self._last_ended), 0.0)
        draft = 0.0 if verified is None else ended.since(verified)
        busy = ended.since(begun)
        self._last_ended = ended
        self._add(Shares(draft, busy - draft, idle), num_requests)
        return busy + min(idle, busy)

    def count_draft(self, seconds: float, num_requests: int) -> None:
        """What a drafter took on the host, between two steps."""
        self._add(Shares(seconds, 0.0, -seconds), num_requests)

    def pause(self) -> None:
        """Nothing is running: waiting for requests is not the device's idleness."""
        self._last_ended = None

    def _add(self, step: Shares, num_requests: int) -> None:
        step.add_to(self._totals, since=Shares())
        share, (draft, verify, other) = max(num_requests, 1), self.shares
        self.shares = Shares(
            draft + step.draft / share, verify + step.verify / share, other + step.other / share
        )

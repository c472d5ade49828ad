"""What steps cost, by their requests and rows: learned from steps that run, or timed with graphs.

Shapes: B requests, R rows of a step. Imports no torch.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]
Rows = Counts | Numbers  # other work of a step may count as a part of a row

OFF_SHARE = 0.85  # guess: of a step without drafts, what is left where none are made either


class Kind(IntEnum):
    """What the drafter does in a step, each less than the one before."""

    DRAFTS = 0
    READS = 1  # the new tokens, to draft later
    RESTS = 2


class StepCosts:
    """What steps cost, relative to each other, by their requests and rows.

    Learned from pairs of steps that ran one after the other: how fast the machine is changes, with
    its other users and with the length of contexts, but hardly from one step to the next. What was
    never seen is expected to compare with what was as `1 + rows / free_rows` does, where
    `free_rows` is the number by which what was seen with about as many requests agrees best. More
    rows never cost less.
    """

    MEMORY = 20.0  # pairs that a step's cost remembers
    OUTLIER = 3.0  # times what was expected, more does not count
    REACH = 0.15  # natural logarithm of the factor at which a measurement counts 1/e
    RESOLUTION = 8  # classes of rows and of requests per doubling
    SCALES = np.array([1.0, 1.0, 10.0])  # one kind of step tells little of another
    FIT_EVERY = 16  # steps
    DOUBT = 1.0  # how much the first guess of `free_rows` weighs

    def __init__(self, free_rows: float) -> None:
        self._first_guess = free_rows
        self._free_rows: dict[int, float] = {}  # by requests in powers of two
        self._places: dict[tuple[int, int, Kind], int] = {}
        self._points = np.zeros((0, 3))  # log requests, log rows, kind
        self._logs, self._weights = np.zeros(0), np.zeros(0)  # logarithm of time
        self._log_guesses = np.zeros(0)  # the same as guessed
        self._last: tuple[int, float] | None = None  # place of the step before, and its logarithm
        self._num_steps = 0

    def observe(self, batch: int, rows: float, seconds: float, kind: Kind = Kind.DRAFTS) -> None:
        """A step right behind the one that was observed last."""
        place, weights = self._place(batch, rows, kind), self._weights
        own = math.log(seconds)
        before, self._last = self._last, (place, own)
        self._num_steps += 1
        if self._num_steps % self.FIT_EVERY == 0:
            self._fit()
        if before is None or before[0] == place:
            return
        other, theirs = before
        most = math.log(self.OUTLIER)
        change = (own - theirs) - float(self._logs[place] - self._logs[other])
        change = min(max(change, -most), most) / (min(weights[place], weights[other]) + 1)
        share = weights[other] / (weights[place] + weights[other])  # the less is known, the more
        self._logs[place] += change * share
        self._logs[other] -= change * (1 - share)
        for one in (place, other):
            weights[one] = min(weights[one] + 1, self.MEMORY)

    def estimate(self, batch: int, rows: Rows, kind: Kind = Kind.DRAFTS) -> Numbers:
        """In a unit of its own.  # rows [n], rising"""
        guess = self._guess(batch, rows, kind)
        if not self._places:
            return guess
        here = self._point(batch, rows, kind)
        distance = np.abs(here[:, None] - self._points) @ self.SCALES / self.REACH  # [n, points]
        nearest = distance.min(1, keepdims=True)  # of far ones, too, something counts
        weights = self._weights * np.exp(nearest - distance)
        logs = (weights * (self._logs - self._log_guesses)).sum(1) / weights.sum(1)
        out: Numbers = np.maximum.accumulate(guess * np.exp(logs))
        return out

    def free_rows(self, batch: float) -> float:
        return self._free_rows.get(round(math.log2(batch)), self._first_guess)

    def _fit(self) -> None:
        """Steps of as many requests that draft, with different rows, say how much rows cost."""
        loads = np.round(self._points[:, 0] / math.log(2)).astype(np.int64)
        factors = 2.0 ** np.arange(-4, 4.25, 0.25)  # [f]
        for load in set(loads.tolist()):
            own = (loads == load) & (self._points[:, 2] == Kind.DRAFTS)
            weights, rows = self._weights[own], np.exp(self._points[own, 1])
            if len(rows) < 2:
                continue
            guesses = np.log1p(rows / (self._first_guess * factors[:, None]))
            off_by = self._logs[own] - guesses  # [f, points]
            off_by -= (off_by @ weights)[:, None] / weights.sum()
            spread = off_by**2 @ weights + self.DOUBT * np.log(factors) ** 2
            self._free_rows[load] = self._first_guess * float(factors[spread.argmin()])
        self._guess_again()

    def _guess_again(self) -> None:
        batch, rows = np.exp(self._points[:, :2]).T
        free_rows = np.array([self.free_rows(n) for n in batch.tolist()])
        off = self._points[:, 2] * math.log(OFF_SHARE)
        self._log_guesses = np.log1p(rows / free_rows) + off

    def _guess(self, batch: int, rows: float | Rows, kind: Kind) -> Numbers:
        return np.asarray(1.0 + np.asarray(rows) / self.free_rows(batch)) * OFF_SHARE**kind

    def _point(self, batch: int, rows: Rows, kind: Kind) -> Numbers:
        """[n] -> [n, 3]"""
        return np.stack(np.broadcast_arrays(math.log(batch), np.log(rows), float(kind)), axis=-1)

    def _place(self, batch: int, rows: float, kind: Kind) -> int:
        """Of a kind of step; the first of its kind is believed to be what is expected."""
        classes = [round(self.RESOLUTION * math.log2(x)) for x in (batch, rows)]
        key = classes[0], classes[1], kind
        if key not in self._places:
            here = np.array([rows])
            expected = np.log(self.estimate(batch, here, kind))
            self._places[key] = len(self._places)
            self._points = np.vstack((self._points, self._point(batch, here, kind)))
            self._logs, self._weights = np.append(self._logs, expected), np.append(self._weights, 1)
            self._guess_again()
        return self._places[key]


class StepRun(NamedTuple):
    """How a step went that drafts were chosen for."""

    seconds: float | None  # None: something else took time, too
    batch: int = 0  # as it was padded
    rows: int = 0  # of these requests, padding included, without those of prompts
    prompt_rows: int = 0  # likewise


class GraphCosts:
    """What steps cost that are CUDA graphs.

    The graph of a step without prompts is timed when it is captured, over nobody's rows. What comes
    on top of that are the contexts of requests, which attention reads, the host's work between two
    steps, and prompts. Prompts take time by their rows, and come with requests, not with steps:
    that part is the same however many steps there are. The rest comes with every step, by much the
    same for any number of drafts. So both parts are learned from all steps, by a straight line.

    What was never timed is estimated from what was, by requests and rows, and believed to cost less
    than that: until it is timed. More rows never cost less.
    """

    REACH = 0.3  # natural logarithm of the factor at which a graph counts 1/e
    OTHER_KIND = 10.0  # steps that draft and steps that do not tell little of each other
    MEMORY = 128.0  # steps

    def __init__(self, free_rows: float) -> None:
        self.free_rows = free_rows
        self._timed: dict[tuple[int, int, bool], int] = {}  # requests, rows, without drafts
        self._points = np.zeros((0, 3))  # their logarithms; the last is 0 or far from it
        self._logs = np.zeros(0)  # logarithm of seconds over guess
        self._estimates: dict[tuple[int, int, bool], float] = {}  # by what was timed so far
        # Of steps lately: their number, and the means of 1, x, y, x * x, x * y, where x are rows
        # of prompts and y is what came on top.
        self._num_steps, self._means = 0.0, np.zeros(5)

    def start(self, batch: int, rows: int, seconds: float, *, is_off: bool = False) -> None:
        """A graph took so long by itself."""
        key = batch, rows, is_off
        if key not in self._timed:
            self._timed[key] = len(self._timed)
            self._points = np.vstack((self._points, self._point(batch, np.array([rows]), is_off)))
            self._logs = np.append(self._logs, 0.0)
        self._logs[self._timed[key]] = math.log(seconds / float(self._guess(rows, is_off)))
        self._estimates.clear()

    def is_timed(self, batch: int, rows: int, *, is_off: bool) -> bool:
        return (batch, rows, is_off) in self._timed

    def observe(self, run: StepRun, *, is_off: bool = False) -> None:
        if run.seconds is None or not self.is_timed(run.batch, run.rows, is_off=is_off):
            return
        key = run.batch, run.rows, is_off
        if key not in self._estimates:
            self._estimates[key] = float(self.alone(key[0], np.array([run.rows]), is_off=is_off)[0])
        alone = self._estimates[key]
        x, y = run.prompt_rows / self.free_rows, run.seconds / alone - 1.0
        y = alone * min(max(y, 0.0), 4.0)  # nothing that is rare
        self._num_steps = min(self._num_steps + 1, self.MEMORY)
        self._means += (np.array([1.0, x, y, x * x, x * y]) - self._means) / self._num_steps

    def on_top(self, batch: int) -> float:
        """Seconds that every step takes longer than its graph by itself. Where nothing else is
        known, rows of prompts cost what others cost."""
        one, x, y, xx, xy = self._means.tolist()
        if not one:
            return 0.0
        low, high = self.alone(batch, np.array([batch, batch + int(self.free_rows)]))
        doubt = 0.1 * x * x + 1e-9
        slope = (xy - x * y + doubt * float(high - low)) / (xx - x * x + doubt)
        return max(y - max(slope, 0.0) * x, 0.0)

    def alone(self, batch: int, rows: Counts, *, is_off: bool = False) -> Numbers:
        """Seconds of graphs by themselves; before any was timed, in a unit of its own.
        rows  # [n], rising"""
        guess = self._guess(rows, is_off)
        if self._timed:
            here = self._point(batch, rows, is_off)
            distance = np.abs(here[:, None] - self._points).sum(2) / self.REACH  # [n, points]
            weights = np.exp(distance.min(1, keepdims=True) - distance)
            guess = guess * np.exp((weights * self._logs).sum(1) / weights.sum(1))
        out: Numbers = np.maximum.accumulate(guess)
        return out

    def hoped(self, batch: int, rows: Counts) -> Numbers:
        """The same, but what was not timed is half way down to the least that it can cost: what
        fewer rows cost that were timed, or its share of what more rows cost."""
        seconds = self.alone(batch, rows)
        is_timed = np.array([self.is_timed(batch, n, is_off=False) for n in rows.tolist()])
        if not is_timed.any():
            return seconds
        known, their_rows = seconds[is_timed], rows[is_timed]
        least = known * np.minimum(rows[:, None] / their_rows, 1.0)  # [n, timed]
        hope = np.sqrt(seconds * np.minimum(least.max(1), seconds))
        return np.where(is_timed, seconds, hope)

    def _guess(self, rows: int | Counts, is_off: bool) -> Numbers:
        return np.asarray(1.0 + np.asarray(rows) / self.free_rows) * (OFF_SHARE**is_off)

    def _point(self, batch: int, rows: Counts, is_off: bool) -> Numbers:
        """[n] -> [n, 3]"""
        other = is_off * self.OTHER_KIND * self.REACH
        return np.stack(np.broadcast_arrays(math.log(batch), np.log(rows), other), axis=-1)

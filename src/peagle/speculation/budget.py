"""How many drafts a step verifies: as many as pay, by what they are worth and what they cost.

Drafts of a request stand in falling order of probability, be they the nodes of a tree or a chain's,
and the first n are the best n. Whether the target takes one does not depend on how many stand
behind it, so every verified draft tells what it is worth, and a step over n of them what any fewer
would have given. The choice is the one with the most expected tokens per second:

    (requests + expected accepted drafts) / seconds of a step with so many rows

Worth and cost are measured while the engine runs. They decide how fast it is, never what it
writes: verification gives the same tokens for every choice.

Shapes: B requests, N drafts at most, K depths. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]

REVIEW_STEPS = 16  # between two looks at which number of drafts is best
# Steps until another number is tried for the first time with some number of requests, and how
# many at most from then on: each time twice as many, for a trial may have a graph captured.
FIRST_TRIAL, RAREST_TRIAL, RAREST_PROBE = 8, 4096, 256
WORTH_A_TRIAL = 0.6  # of the best rate: what promises less is not tried
GAIN_TO_SWITCH = 1.02  # another number must promise so much more: figures are noisy
PADDED_NODES = (1, 3, 7, 15, 31, 63)  # few, for each is a family of CUDA graphs
PADDED_CHAIN = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)


class StepCosts:
    """Seconds of a step by its requests and rows, learned from steps that ran.

    What ran says how a step's time compares with a first guess, `1 + rows / free_rows`; near it,
    the same ratio is expected. More rows never cost less.
    """

    MEMORY = 20  # steps that an average remembers
    OUTLIER = 1.5  # times the average: something else had the machine
    REACH = 0.15  # natural logarithm of the factor at which a measurement counts 1/e
    RESOLUTION = 8  # classes of rows and of requests per doubling

    def __init__(self, free_rows: float) -> None:
        self.free_rows = free_rows
        self._places: dict[tuple[int, int], int] = {}
        self._points = np.zeros((0, 2))  # log requests, log rows
        self._ratios, self._weights = np.zeros(0), np.zeros(0)

    def __bool__(self) -> bool:
        return bool(self._places)

    def observe(self, batch: int, rows: int, seconds: float) -> None:
        place = self._place(batch, rows)
        ratio = seconds / self._guess(rows)
        known, weight = self._ratios[place], self._weights[place]
        if ratio * self.OUTLIER < known:  # steps are late by accident, never early
            known = weight = 0.0
        if weight:
            ratio = min(ratio, self.OUTLIER * known)
        self._weights[place] = weight = min(weight + 1, self.MEMORY)
        self._ratios[place] = known + (ratio - known) / weight

    def estimate(self, batch: int, rows: Counts) -> Numbers:
        """rows  # [n], rising"""
        guess = self._guess(rows)
        if not self:
            return guess
        here = np.stack((np.full(len(rows), np.log(batch)), np.log(rows)), axis=1)
        distance = np.abs(here[:, None] - self._points).sum(2) / self.REACH  # [n, points]
        nearest = distance.min(1, keepdims=True)  # of far ones, too, something counts
        weights = self._weights * np.exp(nearest - distance)
        ratios = np.exp((weights * np.log(self._ratios)).sum(1) / weights.sum(1))
        out: Numbers = np.maximum.accumulate(guess * ratios)
        return out

    def _guess(self, rows: int | Counts) -> Numbers:
        return np.asarray(1.0 + np.asarray(rows) / self.free_rows)

    def _place(self, batch: int, rows: int) -> int:
        key = tuple(round(self.RESOLUTION * float(np.log2(x))) for x in (batch, rows))
        if key not in self._places:
            self._places[key[0], key[1]] = len(self._places)
            self._points = np.concatenate((self._points, np.log([[batch, rows]])))
            self._ratios, self._weights = np.append(self._ratios, 0), np.append(self._weights, 0)
        return self._places[key[0], key[1]]


class Outcomes(NamedTuple):
    """What became of the drafts of a step's requests."""

    num_drafts: Counts  # [B] verified
    paths: Counts  # [B, K] the accepted ones, counted from 1; 0 behind them


class AcceptanceCurve:
    """How often the n-th draft is accepted, of steps lately.

    Where nothing was verified, a first guess goes on from what was.
    """

    MEMORY = 400.0  # drafts of requests that it remembers, at least those of
    MEMORY_STEPS = 50.0
    GUESS_STEPS = 4.0  # that the first guess counts for

    def __init__(self, size: int) -> None:
        self._guess = 0.8 * np.arange(1, size + 1) ** -0.75  # what trees of trained heads look like
        self._steps, self._hits = np.zeros(size), np.zeros(size)

    def observe(self, outcomes: Outcomes, unverified: Numbers | None = None) -> None:
        """unverified  # [B, N] what those are worth that were not verified, where one knows"""
        size = len(self._steps)
        number = np.arange(1, size + 1)
        is_verified = number <= outcomes.num_drafts[:, None]  # [B, N]
        hits = np.bincount(outcomes.paths.ravel(), minlength=size + 1)[1 : size + 1]
        steps = is_verified.sum(0)
        kept = 1.0 - min(len(is_verified) / self.MEMORY, 1.0 / self.MEMORY_STEPS)
        self._steps = kept * self._steps + steps
        self._hits = kept * self._hits + hits
        if unverified is not None:
            self._steps += len(is_verified) - steps
            self._hits += np.where(is_verified, 0.0, unverified).sum(0)

    def values(self) -> Numbers:
        """Of each draft; they never rise.  # [N]"""
        expected = float((self._steps * self._guess).sum())
        scale = (float(self._hits.sum()) + 1e-3) / (expected + 1e-3)
        guess = np.minimum(self._guess * scale, 1.0)
        steps = self._steps + self.GUESS_STEPS
        return falling((self._hits + self.GUESS_STEPS * guess) / steps, steps)


class ScoreCalibration:
    """How often drafts are accepted whose path a drafter gives some log-probability."""

    BIN, BINS = 0.25, 25  # the last holds all that is less probable
    KEPT = 0.995  # of what is known, per step
    GUESS_DRAFTS = 4.0  # that the drafter's own word counts for

    def __init__(self) -> None:
        self._guess = np.exp(-self.BIN * (np.arange(self.BINS) + 0.5))
        self._drafts, self._hits = np.zeros(self.BINS), np.zeros(self.BINS)

    def observe(self, scores: Numbers, outcomes: Outcomes) -> None:
        """scores  # [B, N]; -inf where there is no draft"""
        number = np.arange(1, scores.shape[1] + 1)
        is_verified = number <= outcomes.num_drafts[:, None]
        is_accepted = (outcomes.paths[:, :, None] == number).any(1)
        bins = self._bins(scores)
        for total, which in ((self._drafts, is_verified), (self._hits, is_accepted & is_verified)):
            total *= self.KEPT
            total += np.bincount(bins[which], minlength=self.BINS)

    def values(self, scores: Numbers) -> Numbers:
        """[B, N] -> how likely each is accepted; they never rise along a request's drafts."""
        drafts = self._drafts + self.GUESS_DRAFTS
        table = falling((self._hits + self.GUESS_DRAFTS * self._guess) / drafts, drafts)
        out: Numbers = np.where(scores > -np.inf, table[self._bins(scores)], 0.0)
        return out

    def _bins(self, scores: Numbers) -> Counts:
        out: Counts = np.clip(-scores / self.BIN, 0, self.BINS - 1).astype(np.int64)
        return out


class DraftChoice(NamedTuple):
    """What one step verifies, and what it drafts for the next."""

    caps: Counts  # [B] drafts that each request verifies
    depth: int  # drafts behind each other that are made for the next step; 0: none
    num_drafts: int  # of a request, in shapes that must not depend on values
    expected: Numbers  # [B] drafts of each that will be accepted
    scores: Numbers | None = None  # [B, N] by which caps were chosen

    def part(self, which: NDArray[np.bool_]) -> DraftChoice:
        """For some of the requests, which run by themselves."""
        scores = None if self.scores is None else self.scores[which]
        return self._replace(caps=self.caps[which], expected=self.expected[which], scores=scores)


class DraftBudget:
    """Chooses how many drafts each step verifies.

    Exact rows: every request has its own number, and where the drafts' log-probabilities are
    known (`scores`), rows go to the most probable drafts of all requests. Padded rows (`pad`: to
    how many requests a batch is padded): one of few numbers for all.
    """

    OFF_SHARE = 0.85  # guess: of a step without drafts, what is left where none are made either

    def __init__(
        self,
        max_depth: int,
        max_nodes: int | None,  # None: drafts are chains
        *,
        free_rows: float,
        max_rows: int,  # of a step
        pad: Callable[[int], int] | None = None,
        scores: Callable[[Counts], Numbers] | None = None,  # slots [B] -> [B, N]
    ) -> None:
        self.max_depth, self.max_nodes, self.max_rows = max_depth, max_nodes, max_rows
        self._pad, self._scores = pad, scores
        size = max_depth if max_nodes is None else max_nodes
        self.numbers = self._numbers(size)
        self.curve, self.calibration = AcceptanceCurve(size), ScoreCalibration()
        self.costs, self.costs_off = StepCosts(free_rows), StepCosts(free_rows)
        self.num_drafts = -1  # the choice that holds; 0: no drafts; -1: none yet
        self._batch = 0  # for which it holds
        self._since_review = self._since_trial = 0
        self._trials: dict[int, int] = {}  # so far, by (padded) number of requests
        self._probes = 0  # steps left of a look at drafts while there are none

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        """most  # [B] drafts that each request may have"""
        self._since_review += 1
        is_due = self._since_review >= REVIEW_STEPS or self._padded(len(most)) != self._batch
        if self.num_drafts < 0 or (len(most) and is_due):
            self._review(most if len(most) else self.numbers[-1:])  # prompts alone: one will come
        number = self._explored() if may_explore and len(most) else self.num_drafts
        if number == 0:
            return DraftChoice(np.zeros_like(most), 0, 0, np.zeros(len(most)))
        if self._scores is not None and len(most):
            return self._by_scores(self._scores(slots), most)
        caps = np.minimum(most, number)
        return DraftChoice(caps, self.depth_for(number), number, self._worth()[caps])

    def observe(
        self, choice: DraftChoice, outcomes: Outcomes, seconds: float | None = None
    ) -> None:
        """A step that ran; `seconds` where it held nothing but these requests."""
        batch = len(outcomes.num_drafts)
        if not batch:
            return
        if choice.scores is None:
            self.curve.observe(outcomes)
        else:
            values = self.calibration.values(choice.scores)
            self.curve.observe(outcomes, unverified=values)
            self.calibration.observe(choice.scores, outcomes)
        if seconds is None:
            return
        rows = self._padded(batch) * (choice.num_drafts + 1)
        if self._pad is None:
            rows = batch + int(outcomes.num_drafts.sum())
        costs = self.costs if choice.depth else self.costs_off
        costs.observe(self._padded(batch), rows, seconds)

    def depth_for(self, number: int) -> int:
        """How deep to draft for so many. Few nodes are seldom deep, and each depth costs the
        drafter a row; where rows are exact the number is not known ahead. At least as deep as the
        next larger choice needs: it may be tried in the next step."""
        if self.max_nodes is None:
            return min(number, self.max_depth)
        if self._pad is None:
            return self.max_depth
        return min(max(number, 4), self.max_depth, 6 + number // 6)

    def likely(self, batch: int, *, most_likely_alone: bool) -> list[int]:
        """Numbers that so many requests may be given, by what is known so far."""
        rates = self.rates(np.full(batch, self.numbers[-1]))[1:]
        if most_likely_alone:
            return [int(self.numbers[rates.argmax()])]
        return [n for n, rate in zip(self.numbers.tolist(), rates.tolist(), strict=True) if rate]

    def _numbers(self, size: int) -> Counts:
        if self._pad is None:
            return np.arange(1, size + 1)
        few = PADDED_CHAIN if self.max_nodes is None else PADDED_NODES
        return np.array([*(n for n in few if n < size), size])

    def _padded(self, batch: int) -> int:
        return batch if self._pad is None else self._pad(max(batch, 1))

    def _worth(self) -> Numbers:
        """Expected accepted drafts of the first 0 .. N.  # [N+1]"""
        return np.concatenate(([0.0], np.cumsum(self.curve.values())))

    def _review(self, most: Counts) -> None:
        """Which number is best, if it is clearly better than what holds."""
        self._since_review, batch = 0, self._padded(len(most))
        numbers = np.concatenate(([0], self.numbers))
        rates = self.rates(most)
        best = int(rates.argmax())
        known = np.flatnonzero(numbers == self.num_drafts)
        if batch != self._batch or not len(known):
            known = np.array([best])
        if rates[best] > GAIN_TO_SWITCH * rates[known[0]]:
            known = np.array([best])
        self.num_drafts, self._batch = int(numbers[known[0]]), batch

    def rates(self, most: Counts) -> Numbers:
        """Expected tokens per second: without drafts, and with each of `numbers`."""
        batch, numbers = self._padded(len(most)), self.numbers
        tokens = len(most) + self._worth()[np.minimum(most[:, None], numbers)].sum(0)
        rows = batch * (numbers + 1)
        fits = rows <= max(self.max_rows, rows[0])
        with_drafts = np.where(fits, tokens / self.costs.estimate(batch, rows), 0.0)
        alone = np.array([batch])
        if self.costs_off:
            seconds = self.costs_off.estimate(batch, alone)
        else:
            seconds = self.OFF_SHARE * self.costs.estimate(batch, alone)
        return np.concatenate((len(most) / seconds, with_drafts))

    def _explored(self) -> int:
        """The number that holds, now and then the next larger or smaller. Without drafts: with some
        again, twice in a row, for the first step of the two has none yet."""
        self._since_trial += 1
        rarest = RAREST_TRIAL if self.num_drafts and self._pad is not None else RAREST_PROBE
        count = self._trials.get(self._batch, 0)
        if not self._probes and self._since_trial < min(FIRST_TRIAL << count, rarest):
            return self.num_drafts
        rates = self.rates(np.full(self._batch, self.numbers[-1]))[1:]
        if self._probes:
            self._probes -= 1
            return int(self.numbers[rates.argmax()])
        self._since_trial = 0
        self._trials[self._batch] = min(count + 1, 16)
        if not self.num_drafts:
            self._probes = 1
            return int(self.numbers[rates.argmax()])
        place = int(np.searchsorted(self.numbers, self.num_drafts))
        others = [n for n in (place + 1, place - 1) if 0 <= n < len(rates)]
        others = [n for n in others if rates[n] > WORTH_A_TRIAL * rates.max()]
        return int(self.numbers[others[count % len(others)]]) if others else self.num_drafts

    def _by_scores(self, scores: Numbers, most: Counts) -> DraftChoice:
        """The most probable drafts of all requests, as many as pay."""
        batch, size = scores.shape
        values = self.calibration.values(scores)
        values[np.arange(size) >= most[:, None]] = 0.0
        order = np.argsort(-values, axis=None, kind="stable")
        order = order[: int((values > 0).sum())]
        gains = np.concatenate(([0.0], np.cumsum(values.ravel()[order])))
        gains, order = gains[: self.max_rows - batch + 1], order[: self.max_rows - batch]
        rows = batch + np.arange(len(gains))
        best = int(((batch + gains) / self.costs.estimate(batch, rows)).argmax())
        caps = np.bincount(order[:best] // size, minlength=batch)
        expected = np.where(np.arange(size) < caps[:, None], values, 0.0).sum(1)
        return DraftChoice(caps, self.max_depth, int(caps.max()), expected, scores)


def falling(values: Numbers, weights: Numbers) -> Numbers:
    """The nearest values that never rise: neighbours in the wrong order become their mean."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] < block[0]:
            mean, heavy, length = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, length + block[2])
        blocks.append(block)
    return np.repeat([mean for mean, _, _ in blocks], [length for _, _, length in blocks])

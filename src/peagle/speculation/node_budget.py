"""The budget of trees whose rows are exact: it knows each node's probability before the step.

Shapes: B requests, N nodes at most, K depths. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from peagle.speculation.budget import (
    FIRST_TRIAL,
    GAIN_TO_SWITCH,
    RAREST_PROBE,
    DraftBudget,
    DraftChoice,
    DraftNodes,
    Outcomes,
    falling,
)
from peagle.speculation.costs import Counts, Kind, Numbers

TRIALS = (0.0, 0.5, 2.0)  # times as many drafts as seem best: what do rows cost?
CLEAR_GAIN = 1.5  # of drafts, with which steps without are not tried
NEAR = 0.7  # logarithms by which loads may differ whose gains are alike
DEEPEST_EVERY, DEEPEST_STEPS = 64, 4  # now and then drafts are as deep as can be, for some steps


class ScoreCalibration:
    """How often drafts are accepted whose path a drafter gives some log-probability."""

    BIN, BINS = 0.25, 25  # the last holds all that is less probable
    KEPT = 0.995  # of what is known, per step
    GUESS_DRAFTS = 4.0  # that the drafter's own word counts for

    def __init__(self) -> None:
        self._guess = np.exp(-self.BIN * (np.arange(self.BINS) + 0.5))
        self._drafts, self._hits = np.zeros(self.BINS), np.zeros(self.BINS)
        self._table: Numbers | None = None  # of each bin; None: something new is known

    def observe(self, scores: Numbers, outcomes: Outcomes) -> None:
        """scores  # [B, N]; -inf where there is no draft"""
        number = np.arange(1, scores.shape[1] + 1)
        is_verified = number <= outcomes.num_drafts[:, None]
        is_accepted = (outcomes.paths[:, :, None] == number).any(1)
        bins = self._bins(scores)
        for total, which in ((self._drafts, is_verified), (self._hits, is_accepted & is_verified)):
            total *= self.KEPT
            total += np.bincount(bins[which], minlength=self.BINS)
        self._table = None

    def values(self, scores: Numbers) -> Numbers:
        """[B, N] -> how likely each is accepted; they never rise along a request's drafts."""
        if self._table is None:
            drafts = self._drafts + self.GUESS_DRAFTS
            self._table = falling((self._hits + self.GUESS_DRAFTS * self._guess) / drafts, drafts)
        out: Numbers = np.where(scores > -np.inf, self._table[self._bins(scores)], 0.0)
        return out

    def _bins(self, scores: Numbers) -> Counts:
        out: Counts = np.clip(-scores / self.BIN, 0, self.BINS - 1).astype(np.int64)
        return out


class DepthCurve:
    """Of steps lately with so many trees: how many nodes each had verified at each depth, and how
    often one was accepted there."""

    MEMORY, GUESS = 16, 4  # steps

    def __init__(self, max_depth: int) -> None:
        accepted = 0.75 ** np.arange(1.0, max_depth + 1)  # what trained heads begin with
        self._guess = np.stack((accepted**0.5, accepted))  # [2, K]
        self._steps: dict[int, int] = {}  # by trees
        self._means: dict[int, Numbers] = {}  # [2, K]

    def observe(self, nodes: DraftNodes, outcomes: Outcomes, drafted: int) -> None:
        """`drafted`: how deep the trees were; nothing is known of what stands deeper."""
        num_trees, width = int(nodes.is_there.sum()), outcomes.paths.shape[1]
        if not num_trees:
            return
        number = np.arange(1, nodes.depths.shape[1] + 1)
        is_verified = number <= outcomes.num_drafts[:, None]
        seen = np.zeros_like(self._guess)
        seen[0] = np.bincount(nodes.depths[is_verified], minlength=seen.shape[1] + 1)[1:]
        seen[1, :width] = (outcomes.paths > 0).sum(0)
        means = self._means[num_trees] = self.values(num_trees).copy()
        steps = self._steps[num_trees] = self._steps.get(num_trees, self.GUESS) + 1
        means[:, :drafted] += (seen / num_trees - means)[:, :drafted] / min(steps, self.MEMORY)

    def values(self, num_trees: int) -> Numbers:
        """Verified and accepted nodes of a tree by depth: with as many trees, or the number of them
        that is nearest to it.  # [2, K]"""
        if not self._means:
            return self._guess
        return self._means[min(self._means, key=lambda n: abs(math.log(n / num_trees)))]


class Load(NamedTuple):
    """How many requests there are, and how many of them may have drafts."""

    batch: int
    num_trees: int


class NodeBudget(DraftBudget):
    """Verifies the most probable nodes of all requests, as many as pay, and drafts for the next
    step as deep as pays.

    Everything is found out by trying: now and then a step has no drafts, or half or twice as many
    as seem best, which shows what rows cost, or drafts as deep as it can. Without drafts they are
    tried again twice in a row, for the first step of the two has none yet.
    """

    def __init__(
        self,
        max_depth: int,
        max_nodes: int,
        *,
        free_rows: float,
        max_rows: int,
        nodes: Callable[[Counts], DraftNodes],  # of slots [B]
        depth_cost: float,  # of drafting deeper by one, for each tree, in rows of the target
        read_cost: float = 0.0,
    ) -> None:
        super().__init__(
            max_depth, max_nodes, free_rows=free_rows, max_rows=max_rows, read_cost=read_cost
        )
        self.numbers = np.arange(1, max_nodes + 1)
        self.calibration, self.depths = ScoreCalibration(), DepthCurve(max_depth)
        self._nodes, self._depth_cost = nodes, depth_cost
        self._drafted = self._drafts = max_depth  # how deep, in the step before and in this one
        self._num_steps = 0
        self._load = Load(0, 0)
        self._gains: dict[Load, float] = {}  # what drafts gained lately
        self._is_on: dict[Load, bool] = {}
        self._since_trial = 0
        self._tried: dict[int, int] = {}  # how often, by requests in powers of two

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        load = self._load = Load(len(most), int((most > 0).sum()))
        if load.num_trees:
            share = self._share(load, most, may_explore=may_explore)
            choice = self._by_scores(load, most, self._nodes(slots), share)
        else:  # of prompts alone some will have drafts
            depth = 0 if load.batch else self.max_depth
            choice = DraftChoice(np.zeros_like(most), depth, depth, np.zeros(load.batch))
        self._drafted, self._drafts = self._drafts, choice.depth
        return choice

    def _draft_gain(self, batch: int) -> float:
        known = self._nearest_gain(Load(batch, batch))
        return super()._draft_gain(batch) if known is None else known

    def after_cut(self, choice: DraftChoice, slots: Counts) -> DraftChoice:
        return choice if choice.nodes is None else choice._replace(nodes=self._nodes(slots))

    def _share(self, load: Load, most: Counts, *, may_explore: bool) -> float:
        """How many of the drafts that seem to pay are verified: all, none, or as many as a trial
        says."""
        is_on = self._is_on[load] = self._pays(load, most)
        if self._probes:
            self._probes -= 1
            return 1.0
        kind = round(math.log2(load.batch))
        tried, self._since_trial = self._tried.get(kind, 0), self._since_trial + 1
        next_trial = min(FIRST_TRIAL << min(tried, 5), RAREST_PROBE)
        if self._since_trial < next_trial or not (may_explore or not is_on):
            return float(is_on)
        self._since_trial, self._tried[kind] = 0, tried + 1
        if is_on:
            trial = TRIALS[tried % len(TRIALS)]
            return trial if trial or self._gains.get(load, 1.0) < CLEAR_GAIN else 1.0
        self._probes = 1
        return 1.0

    def _pays(self, load: Load, most: Counts) -> bool:
        gain = self._nearest_gain(load)
        if gain is None:
            self._worth = self._expected()
            rates = self.rates(most)
            gain = float(rates[1:].max() / rates[0])
        return gain > (1.0 if self._is_on.get(load, True) else GAIN_TO_SWITCH)

    def _nearest_gain(self, load: Load) -> float | None:
        if load in self._gains:
            return self._gains[load]

        def distance(other: Load) -> float:
            return sum(abs(math.log(a / b)) for a, b in zip(load, other, strict=True))

        nearest = min(self._gains, key=distance, default=load)
        return self._gains.get(nearest) if distance(nearest) < NEAR else None

    def _by_scores(self, load: Load, most: Counts, nodes: DraftNodes, share: float) -> DraftChoice:
        """The most probable drafts of all requests."""
        batch, size = nodes.scores.shape
        best_depth = self._best_depth(load)
        depth = self.max_depth if self._looks_deeper() else best_depth
        values = self.calibration.values(nodes.scores)
        values[np.arange(size) >= most[:, None]] = 0.0
        order = np.argsort(-values, axis=None, kind="stable")
        order = order[: min(int((values > 0).sum()), self.max_rows - batch)]
        tokens = batch + np.concatenate(([0.0], np.cumsum(values.ravel()[order])))
        drafting = self._draft_rows(load.num_trees, depth)
        rates = tokens / self.costs.estimate(batch, batch + np.arange(len(tokens)) + drafting)
        if depth == best_depth and nodes.is_there.sum() * 2 > load.num_trees:
            without = batch / self.costs.estimate(batch, np.array([batch]), Kind.READS)[0]
            self._remember(load, float(rates.max() / without))
        if not share:
            return DraftChoice(np.zeros_like(most), 0, 0, np.zeros(batch))
        count = round(int(rates.argmax()) * share)
        if not self._is_on.get(load, True):  # a look at drafts: each tree shows one
            count = max(count, load.num_trees)
        count = min(count, len(order))
        caps = np.bincount(order[:count] // size, minlength=batch)
        expected = np.where(np.arange(size) < caps[:, None], values, 0.0).sum(1)
        most_drafts = max(int(caps.max()), 1)
        return DraftChoice(caps, depth, most_drafts, expected, nodes, drafting_rows=drafting)

    def _remember(self, load: Load, gain: float) -> None:
        """Where there are no drafts, one step in hundreds tells anything."""
        before, memory = self._gains.get(load, gain), 16 if self._is_on.get(load) else 2
        self._gains[load] = before + (gain - before) / memory

    def _learn(self, choice: DraftChoice, outcomes: Outcomes) -> None:
        if choice.nodes is None:
            return
        values, there = self.calibration.values(choice.nodes.scores), choice.nodes.is_there
        own = Outcomes(outcomes.num_drafts[there], outcomes.paths[there])
        self.curve.observe(own, unverified=values[there])
        self.calibration.observe(choice.nodes.scores, outcomes)
        self.depths.observe(choice.nodes, outcomes, self._drafted)

    def _kind(self, choice: DraftChoice) -> Kind:
        return super()._kind(choice) if self._load.num_trees else Kind.RESTS

    def _usual_drafting_rows(self, most: Counts) -> float:
        load = Load(len(most), int((most > 0).sum()))
        return self._draft_rows(load.num_trees, self._best_depth(load))

    def _draft_rows(self, num_trees: int, depth: int) -> float:
        """What drafting so deep takes: the first draft comes with rows that are read anyway."""
        return self._depth_cost * num_trees * max(depth - 1, 0)

    def _looks_deeper(self) -> bool:
        """For several steps, for the target walks no deeper than the step drafts."""
        self._num_steps = (self._num_steps + 1) % DEEPEST_EVERY
        return self._num_steps >= DEEPEST_EVERY - DEEPEST_STEPS

    def _best_depth(self, load: Load) -> int:
        """A depth costs the drafter rows of each tree, whatever becomes of it. Of depths that are
        about as good the deepest: then more is learned of them."""
        batch, num_trees = load
        if not (self._depth_cost and num_trees):
            return self.max_depth
        nodes, accepted = self.depths.values(num_trees)
        drafting = self._depth_cost * np.arange(self.max_depth)
        seconds = self.costs.estimate(batch, batch + num_trees * (nodes.cumsum() + drafting))
        rates = (batch + num_trees * accepted.cumsum()) / seconds
        return int(np.flatnonzero(rates * GAIN_TO_SWITCH >= rates.max())[-1]) + 1

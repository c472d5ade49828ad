"""How many drafts a step verifies: as many as pay, by what they are worth and what they cost.

Drafts of a request stand in falling order of probability, be they the nodes of a tree or a chain's,
and the first n are the best n. Whether the target takes one does not depend on how many stand
behind it, so every verified draft tells what it is worth, and a step over n of them what any fewer
would have given. The choice is the one with the most expected tokens per second:

    (requests + expected accepted drafts) / seconds of a step with so many rows

Worth and cost are measured while the engine runs: worth here, costs in speculation/costs.py. They
decide how fast it is, never what it writes: verification gives the same tokens for every choice.

Shapes: B requests, N drafts at most, K depths. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from peagle.speculation.costs import Counts, GraphCosts, Kind, Numbers, StepCosts, StepRun

REVIEW_STEPS = 16  # between two looks at which number of drafts is best
# Steps until another number is tried for the first time with some number of requests, and how
# many at most from then on: each time twice as many, for a trial may have a graph captured.
FIRST_TRIAL, RAREST_TRIAL, RAREST_PROBE = 8, 4096, 256
WORTH_A_TRIAL = 0.6  # of the best rate: what promises less is not tried
GAIN_TO_SWITCH = 1.02  # another number must promise so much more: figures are noisy
CAPTURE_SECONDS = 0.1  # of a CUDA graph
# While there are no drafts and no graph to look at them with: about the share of time that may go
# into capturing one.
PROBE_SHARE = 0.02
# What is chosen from: few, for each has to be tried, and is a family of CUDA graphs.
TREE_NUMBERS = (1, 3, 5, 7, 15, 31, 63)
MOST_OF_MEAN = 4  # times as many nodes as the mean, for requests that are sure of theirs
CHAIN_NUMBERS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)


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
        size, batch = len(self._steps), len(outcomes.num_drafts)
        hits = np.bincount(outcomes.paths.ravel(), minlength=size + 1)[1 : size + 1]
        fewer = np.bincount(outcomes.num_drafts, minlength=size + 1).cumsum()[:size]
        steps = batch - fewer  # in which the n-th was verified
        kept = 1.0 - min(batch / self.MEMORY, 1.0 / self.MEMORY_STEPS)
        self._steps = kept * self._steps + steps
        self._hits = kept * self._hits + hits
        if unverified is not None:
            is_verified = np.arange(size) < outcomes.num_drafts[:, None]
            self._steps += fewer
            self._hits += np.where(is_verified, 0.0, unverified).sum(0)

    def values(self) -> Numbers:
        """Of each draft; they never rise.  # [N]"""
        expected = float((self._steps * self._guess).sum())
        scale = (float(self._hits.sum()) + 1e-3) / (expected + 1e-3)
        guess = np.minimum(self._guess * scale, 1.0)
        steps = self._steps + self.GUESS_STEPS
        return falling((self._hits + self.GUESS_STEPS * guess) / steps, steps)


class DraftNodes(NamedTuple):
    """The trees that requests have."""

    scores: Numbers  # [B, N] log-probabilities of paths; -inf where there is no node
    depths: Counts  # [B, N]

    def of(self, which: NDArray[np.bool_]) -> DraftNodes:
        return DraftNodes(self.scores[which], self.depths[which])

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """Which requests have any.  # [B]"""
        out: NDArray[np.bool_] = self.scores[:, 0] > -np.inf
        return out


class DraftForm(NamedTuple):
    """The shape of a step's drafts, which under CUDA graphs must not depend on values."""

    depth: int
    num_drafts: int  # of one request, at most
    mean: int | None  # of a request on average, where all share rows; None: they do not


class DraftChoice(NamedTuple):
    """What one step verifies, and what it drafts for the next."""

    caps: Counts  # [B] drafts that each request verifies, at most
    depth: int  # drafts behind each other that are made for the next step; 0: none
    num_drafts: int  # of a request, in shapes that must not depend on values
    expected: Numbers  # [B] drafts of each that will be accepted
    nodes: DraftNodes | None = None  # by which caps were chosen
    # Of all requests, on average, where the device shares them out by their probability; None: as
    # many as `caps` say.
    mean_drafts: int | None = None
    drafting_rows: float = 0.0  # what drafting takes, in rows, where that is not always the same

    @property
    def number(self) -> int:
        """Of drafts that each request has, on average where all share rows."""
        return self.num_drafts if self.mean_drafts is None else self.mean_drafts

    def part(self, which: NDArray[np.bool_]) -> DraftChoice:
        """For some of the requests, which run by themselves."""
        nodes = None if self.nodes is None else self.nodes.of(which)
        return self._replace(caps=self.caps[which], expected=self.expected[which], nodes=nodes)

    def unshared(self) -> DraftChoice:
        """With the mean for each request."""
        mean = self.mean_drafts
        if mean is None:
            return self
        return self._replace(caps=np.minimum(self.caps, mean), num_drafts=mean, mean_drafts=None)


class DraftBudget:
    """Chooses how many drafts each step verifies.

    Exact rows: all requests have the same number of drafts; NodeBudget is for trees. Padded rows
    (`pad`: to how many requests a batch is padded): one of few numbers. Trees share so many rows
    for each request by their nodes' probabilities on the device, and those of the requests that a
    batch is padded with. A node's place is then that among the nodes of all requests, divided by
    their number, so that here, too, those of any smaller number are the first ones. All chains have
    the same length. Each number needs a CUDA graph for every number of requests and of prompt rows:
    where there is none yet, another number stands in for as long as it costs less than capturing
    one (`captured`).
    """

    def __init__(
        self,
        max_depth: int,
        max_nodes: int | None,  # None: drafts are chains
        *,
        free_rows: float,
        max_rows: int,  # of a step
        pad: Callable[[int], int] | None = None,
        depth_is_free: bool = False,  # trees are drafted beside the step
        read_cost: float = 0.0,  # of a row that the drafter only reads, in rows of the target
    ) -> None:
        self.max_depth, self.max_nodes, self.max_rows = max_depth, max_nodes, max_rows
        self._pad, self._depth_is_free, self._read_cost = pad, depth_is_free, read_cost
        size = max_depth if max_nodes is None else max_nodes
        self.numbers = self._numbers(size)
        self.curve = AcceptanceCurve(size)
        self.costs, self.graph_costs = StepCosts(free_rows), GraphCosts(free_rows)
        # Seconds that steps lost by another number than the best, for want of its graph: by
        # requests, number and rows of prompts.
        self._lost: dict[tuple[int, int, int], float] = {}
        # At the last review: what drafts are worth, and the hoped rate of each number that fits.
        self._worth, self._rates = self._expected(), dict[int, float]()
        self.num_drafts = -1  # the choice that holds; 0: no drafts; -1: none yet
        self._batch = 0  # for which it holds
        self._since_review = self._since_trial = 0
        self._is_stable = False  # whether as many requests were there at the last review
        self._trials: dict[int, int] = {}  # so far, by (padded) number of requests
        self._probes = 0  # steps left of a look at drafts while there are none

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        """most  # [B] drafts that each request may have"""
        self._since_review += 1
        is_due = self._since_review >= REVIEW_STEPS or self._padded(len(most)) != self._batch
        if self.num_drafts < 0 or (len(most) and is_due):
            self._review(most if len(most) else self.numbers[-1:])  # prompts alone: one will come
        # Without drafts nothing is learned of them, so then they are tried beside prompts, too.
        explores = (may_explore or not self.num_drafts) and len(most) > 0
        return self._choice(self._explored() if explores else self.num_drafts, most)

    def _choice(self, number: int, most: Counts) -> DraftChoice:
        """With one number for all, or for all on average."""
        if number == 0:
            return DraftChoice(np.zeros_like(most), 0, 0, np.zeros(len(most)))
        form = self.form_of(number, len(most))
        worth = self._worth[np.minimum(most, self._each(number, len(most)))]
        return DraftChoice(np.minimum(most, form.num_drafts), *form[:2], worth, None, form.mean)

    def captured(
        self,
        choice: DraftChoice,
        most: Counts,  # [B]
        prompt_rows: int,
        has_graph: Callable[[DraftChoice], bool],
    ) -> DraftChoice:
        """This choice, or the best of those that a graph was captured for. What the others lose
        against it adds up; when that is what capturing takes, it is captured."""
        if has_graph(choice) or not len(most):
            return choice
        number, batch, rates = choice.number, self._padded(len(most)), self._rates
        room = max(self.max_rows, batch * (number + 1) + prompt_rows)
        others = sorted(rates, key=rates.__getitem__, reverse=True)
        if not self.num_drafts:  # a look at drafts: any are better than none
            others.sort(key=lambda other: not other)
        for other in others:
            if other == number or batch * (other + 1) + prompt_rows > room:
                continue
            stand_in = self._choice(other, most)
            if has_graph(stand_in):
                return stand_in if self._can_wait(choice, stand_in, prompt_rows) else choice
        return choice

    def needs_timing(self, choice: DraftChoice) -> bool:
        """Whether a step of this choice, without prompts, is to be timed by itself: as soon as so
        many requests are there for longer than a moment."""
        if self._pad is None or not self._is_stable or not len(choice.caps):
            return False
        batch, number = self._padded(len(choice.caps)), choice.number
        rows = batch * (number + 1)
        return not self.graph_costs.is_timed(batch, rows, is_off=not choice.depth)

    def _can_wait(self, choice: DraftChoice, stand_in: DraftChoice, prompt_rows: int) -> bool:
        batch, rate = len(choice.caps), self._rates[stand_in.number]
        gain = 1.0 - rate / max(self._rates.get(choice.number, 0.0), rate)
        if not self.num_drafts and not stand_in.number:  # what drafts are worth stays unknown
            gain = max(gain, PROBE_SHARE * RAREST_PROBE)
        seconds = (batch + float(stand_in.expected.sum())) / rate
        key = self._padded(batch), choice.number, prompt_rows
        self._lost[key] = self._lost.get(key, 0.0) + gain * seconds
        return self._lost[key] < CAPTURE_SECONDS

    def _each(self, numbers: int | Counts, batch: int) -> int | Counts:
        """Drafts that so many requests have of their own and of the padding's, on average."""
        if not self._shares(batch):
            return numbers
        return numbers * self._padded(batch) // batch

    def _shares(self, batch: int) -> bool:
        return self._pad is not None and self.max_nodes is not None and self._padded(batch) > 1

    def fitted(self, choice: DraftChoice, rows: int) -> DraftChoice:
        """With drafts shared from so many rows at most, beside those of the newest tokens."""
        mean, batch = choice.mean_drafts, len(choice.caps)
        if mean is None or mean * batch <= rows:
            return choice
        fewer = [n for n in self.numbers.tolist() if n * batch <= rows]
        depth, most, mean = self.form_of(fewer[-1] if fewer else 1, batch)
        caps = np.minimum(choice.caps, most if fewer else 0)
        return choice._replace(caps=caps, depth=depth, num_drafts=most, mean_drafts=mean)

    def after_cut(self, choice: DraftChoice, slots: Counts) -> DraftChoice:
        """For slots of which drafts have left since they were chosen from: the n-th is another."""
        return choice

    def observe(self, choice: DraftChoice, outcomes: Outcomes, run: StepRun) -> None:
        """A step that ran."""
        batch = len(outcomes.num_drafts)
        if not batch:
            return
        self._learn(choice, outcomes)
        if self._pad is not None:
            self.graph_costs.observe(run, is_off=not choice.depth)
        elif run.seconds is not None and not run.prompt_rows:
            rows = batch + int(outcomes.num_drafts.sum()) + choice.drafting_rows
            self.costs.observe(batch, rows, run.seconds, self._kind(choice))

    def _kind(self, choice: DraftChoice) -> Kind:
        return Kind.DRAFTS if choice.depth else Kind.READS

    def _learn(self, choice: DraftChoice, outcomes: Outcomes) -> None:
        """What drafts are worth."""
        self.curve.observe(outcomes)

    def form_of(self, number: int, batch: int) -> DraftForm:
        """Of so many drafts for each of so many requests. Where trees share rows, one may have
        several times as many as another."""
        if self.max_nodes is None:
            return DraftForm(min(number, self.max_depth), number, None)
        shares = self._shares(batch) and number < self.max_nodes
        depth = self._tree_depth(number, shares)
        if not shares:
            return DraftForm(depth, number, None)
        return DraftForm(depth, min(MOST_OF_MEAN * number + 3, self.max_nodes), number)

    def _tree_depth(self, number: int, shares: bool) -> int:
        """How deep to draft for so many. Few nodes are seldom deep, and each depth costs the
        drafter a row; where rows are exact the number is not known ahead. At least as deep as the
        next larger choice needs: it may be tried in the next step. As deep as trees are that were
        drafted beside the step: the target walks no further."""
        if self._pad is None or self._depth_is_free:
            return self.max_depth
        deep = 6 + number // 3 if shares else min(max(number, 4), 6 + number // 6)
        return min(deep, self.max_depth)

    def likely(self, batch: int, *, most_likely_alone: bool) -> list[int]:
        """Numbers that so many requests may be given, by what is known so far."""
        rates = self.rates(np.full(batch, self.numbers[-1]))[1:]
        if most_likely_alone:
            return [int(self.numbers[rates.argmax()])]
        return [n for n, rate in zip(self.numbers.tolist(), rates.tolist(), strict=True) if rate]

    def _numbers(self, size: int) -> Counts:
        few = CHAIN_NUMBERS if self.max_nodes is None else TREE_NUMBERS
        return np.array([*(n for n in few if n < size), size])

    def _padded(self, batch: int) -> int:
        return batch if self._pad is None else self._pad(max(batch, 1))

    def _expected(self) -> Numbers:
        """Accepted drafts of the first 0 .. N.  # [N+1]"""
        return np.concatenate(([0.0], np.cumsum(self.curve.values())))

    def _review(self, most: Counts) -> None:
        """Which number is best, if it is clearly better than what holds."""
        self._since_review, batch = 0, self._padded(len(most))
        self._is_stable = batch == self._batch
        numbers, self._worth = np.concatenate(([0], self.numbers)), self._expected()
        rates = self.rates(most, hopes=True)
        self._rates = {
            n: rate for n, rate in zip(numbers.tolist(), rates.tolist(), strict=True) if rate
        }
        best = int(rates.argmax())
        holds = np.flatnonzero((numbers == self.num_drafts) & (batch == self._batch))
        if not len(holds) or rates[best] > GAIN_TO_SWITCH * rates[holds[0]]:
            self.num_drafts, self._batch = int(numbers[best]), batch
            self._trials[batch] = min(self._trials.get(batch, 0), 3)  # it has other neighbours

    def rates(self, most: Counts, *, hopes: bool = False) -> Numbers:
        """Expected tokens per time: without drafts, and with each of `numbers`. `hopes`: what
        graphs cost that were never timed is taken to be less than the estimate."""
        batch, numbers = self._padded(len(most)), np.concatenate(([0], self.numbers))
        each = self._each(numbers, max(len(most), 1))
        tokens = len(most) + self._worth[np.minimum(most[:, None], each)].sum(0)
        rows = batch * (numbers + 1)
        if self._pad is None:
            without = self.costs.estimate(batch, rows[:1], Kind.READS)
            rows_with = rows[1:] + self._usual_drafting_rows(most)
            seconds = np.concatenate((without, self.costs.estimate(batch, rows_with)))
        else:
            costs = self.graph_costs
            without = costs.alone(batch, rows[:1], is_off=True)
            with_drafts = costs.hoped(batch, rows[1:]) if hopes else costs.alone(batch, rows[1:])
            seconds = np.concatenate((without, with_drafts)) + costs.on_top(batch)
        fits = rows <= max(self.max_rows, rows[1])
        out: Numbers = np.where(fits, tokens / seconds, 0.0)
        return out

    def _usual_drafting_rows(self, most: Counts) -> float:
        return 0.0

    @property
    def rows_are_exact(self) -> bool:
        return self._pad is None

    def gain(self, batch: int, answer: int, prompt: int = 0, again: int = 0) -> float:
        """By what one of so many requests takes longer without a drafter than with drafts.
        `answer`: tokens to write; rows of its `prompt` the drafter has to read, too; those of its
        context that are computed `again` are for the drafter's sake alone."""
        reads = float(self.rates(np.full(batch, 1))[0])
        without = answer / reads * self._read_share(batch) + prompt * self._row(batch)
        read = (prompt + again) * self._read_cost + again
        with_drafts = answer / (reads * self._draft_gain(batch)) + prompt * self._row(batch)
        return without / (with_drafts + read * self._row(batch))

    def _draft_gain(self, batch: int) -> float:
        """By what drafts multiply the tokens per second, if all requests may have some, compared
        with a drafter that only reads."""
        rates = self.rates(np.full(batch, self.numbers[-1]))
        return float(rates[1:].max() / rates[0])

    def _row(self, batch: int) -> float:
        """Time of one row more among many."""
        few, many = self.costs.estimate(batch, np.array([batch + 64, batch + 128]))
        return float(many - few) / 64

    def _read_share(self, batch: int) -> float:
        """Time of a step without a drafter over that of one with a drafter that only reads."""
        one = np.array([batch])
        rests, reads = (self.costs.estimate(batch, one, k) for k in (Kind.RESTS, Kind.READS))
        return float(rests[0] / reads[0])

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

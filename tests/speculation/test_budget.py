"""The budget finds the number of drafts with the most tokens per second, and follows the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.speculation.budget import (
    CAPTURE_SECONDS,
    RAREST_PROBE,
    AcceptanceCurve,
    DraftBudget,
    DraftChoice,
    DraftNodes,
    Outcomes,
    falling,
)
from peagle.speculation.costs import Counts, GraphCosts, Kind, Numbers, StepCosts, StepRun
from peagle.speculation.node_budget import NodeBudget, ScoreCalibration

Seconds = Callable[[int, int], float]  # requests, rows
PROMPT_ROWS = 80  # of a prompt
SURE = 0.9 ** np.arange(1, 16)
UNSURE = 0.45 ** np.arange(1, 16)
NEVER = np.zeros(15)


def flat(batch: int, rows: int) -> float:
    """A GPU that reads weights: rows are free for long."""
    return 1.0 + max(rows - 64, 0) / 64


def steep(batch: int, rows: int) -> float:
    """Each row costs a fifth of the step without any."""
    return 1.0 + 0.2 * rows


class World:
    """Drafts that are accepted with given probabilities, in steps that cost what they cost: in
    milliseconds. Where shapes are padded steps are graphs, and new requests bring prompts."""

    def __init__(
        self,
        budget: DraftBudget,
        seconds: Seconds,
        *,
        is_padded: bool,
        prompts_per_token: float = 0.0,
        on_top: float = 0.0,  # of each graph
    ) -> None:
        self.budget, self.seconds, self.is_padded = budget, seconds, is_padded
        self.prompts_per_token, self.on_top = prompts_per_token, on_top
        self.rng = np.random.default_rng(0)
        self.time = self.tokens = self.num_prompts = 0.0
        self.pace = 1.0  # of a machine that others use, too
        self.num_there: Counts | None = None  # drafts that the last step made
        self.graphs = set[tuple[int, int, int]]()  # requests, number, rows of prompts

    def run(self, steps: int, batch: int, values: Numbers) -> list[DraftChoice]:
        """The first draft that is not accepted ends the path: of a chain, that is."""
        made, self.time, self.tokens = [], 0.0, 0.0
        size = len(values)
        before = np.r_[1.0, values[:-1]]
        conditional = np.where(before > 0, values / np.maximum(before, 1e-9), 0.0)
        for _ in range(steps):
            num_prompts = int(self.num_prompts)
            self.num_prompts -= num_prompts
            prompt_rows = PROMPT_ROWS * num_prompts
            most = np.full(batch, size)
            choice = self.budget.choose(np.arange(batch), most, may_explore=not prompt_rows)
            if self.is_padded:
                choice = self.captured(choice, most, prompt_rows)
            there = 0 if self.num_there is None else size
            caps = np.minimum(choice.unshared().caps, there)  # all are as probable as each other
            agrees = self.rng.random((batch, size)) < conditional
            accepted = np.minimum(agrees.cumprod(1).sum(1).astype(np.int64), caps)
            number = np.arange(1, size + 1)
            paths = np.where(number <= accepted[:, None], number, 0)
            if self.is_padded:
                rows, noise = batch * (choice.number + 1), 1.0
                seconds = self.seconds_of(batch, rows + prompt_rows, choice) + 0.001 * self.on_top
            else:
                rows, noise = batch + int(caps.sum()), self.noise()
                seconds = self.seconds_of(batch, rows, choice)
            run = StepRun(seconds * noise, batch, rows, prompt_rows)
            self.budget.observe(choice, Outcomes(caps, paths), run)
            self.num_there = caps if choice.depth else None
            self.time += seconds
            self.tokens += batch + float(accepted.sum())
            self.num_prompts += self.prompts_per_token * (batch + float(accepted.sum()))
            made.append(choice)
        return made

    def captured(self, choice: DraftChoice, most: Counts, prompt_rows: int) -> DraftChoice:
        """The choice that is run; its graph is captured if there is none yet."""
        batch = len(most)

        def has_graph(choice: DraftChoice) -> bool:
            return (batch, choice.number, prompt_rows) in self.graphs

        choice = self.budget.captured(choice, most, prompt_rows, has_graph)
        if self.budget.needs_timing(choice):
            self.capture(batch, choice, 0)
        if not has_graph(choice):
            self.capture(batch, choice, prompt_rows)
        return choice

    def capture(self, batch: int, choice: DraftChoice, prompt_rows: int) -> None:
        self.graphs.add((batch, choice.number, prompt_rows))
        if not prompt_rows:
            rows = batch * (choice.number + 1)
            alone = self.seconds_of(batch, rows, choice)
            self.budget.graph_costs.start(batch, rows, alone, is_off=not choice.depth)

    def seconds_of(self, batch: int, rows: int, choice: DraftChoice) -> float:
        return 0.001 * (self.seconds(batch, rows) + 0.1 * (choice.depth > 0))

    def noise(self) -> float:
        late = 5.0 if self.rng.random() < 0.02 else 1.0
        self.pace *= float(np.exp(0.1 * self.rng.standard_normal()))
        self.pace = min(max(self.pace, 0.3), 3.0)
        return self.pace * late * float(np.exp(0.05 * self.rng.standard_normal()))

    @property
    def rate(self) -> float:
        return self.tokens / self.time

    def best_rate(self, batch: int, values: Numbers) -> float:
        """Of a fixed number of drafts, or of none."""
        worth = np.r_[0.0, values.cumsum()]
        rates = []
        for n in [0, *self.budget.numbers.tolist()]:
            rows, tokens = batch * (n + 1), batch * (1 + worth[n])
            num_prompts = self.prompts_per_token * tokens  # in a step
            few, share = int(num_prompts), num_prompts % 1
            low, high = (self.seconds(batch, rows + PROMPT_ROWS * m) for m in (few, few + 1))
            mean = (1 - share) * low + share * high + self.on_top + 0.1 * (n > 0)
            rates.append(tokens / (0.001 * mean))
        return max(rates)


def make_budget(
    *,
    is_padded: bool,
    free_rows: float = 24.0,
    max_rows: int = 2048,
    nodes: int | None = 15,
) -> DraftBudget:
    pad = (lambda batch: batch) if is_padded else None
    return DraftBudget(15, nodes, free_rows=free_rows, max_rows=max_rows, pad=pad)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("values", [SURE, UNSURE, NEVER], ids=["sure", "unsure", "never"])
@pytest.mark.parametrize("batch", [1, 16])
def test_it_comes_near_to_the_best_fixed_number(
    batch: int, values: Numbers, seconds: Seconds, is_padded: bool
) -> None:
    world = World(make_budget(is_padded=is_padded), seconds, is_padded=is_padded)
    world.run(4000 if is_padded else 400, batch, values)  # graphs are not captured lightly
    world.run(600, batch, values)
    assert world.rate > 0.93 * world.best_rate(batch, values)


@pytest.mark.parametrize("is_padded", [False, True])
def test_it_follows_the_load(is_padded: bool) -> None:
    world = World(make_budget(is_padded=is_padded), flat, is_padded=is_padded)
    numbers = []
    for batch in (1, 64, 1):
        world.run(2000, batch, SURE)
        made = world.run(500, batch, SURE)
        assert world.rate > 0.9 * world.best_rate(batch, SURE)
        numbers.append(np.mean([c.unshared().num_drafts for c in made[-100:]]))
    assert numbers[1] < numbers[0] / 2
    assert numbers[2] > 2 * numbers[1]


@pytest.mark.parametrize("is_padded", [False, True])
def test_drafts_that_never_pay_are_given_up_and_taken_up_again_when_they_do(
    is_padded: bool,
) -> None:
    world = World(make_budget(is_padded=is_padded), steep, is_padded=is_padded)
    made = world.run(500, 4, NEVER)
    assert np.mean([c.depth == 0 for c in made[-200:]]) > 0.9
    assert world.run(3000, 4, SURE)[-1].num_drafts > 0
    world.run(300, 4, SURE)
    assert world.rate > 0.95 * world.best_rate(4, SURE)


@pytest.mark.parametrize("prompts_per_token", [0.003, 0.03])
@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("values", [SURE, UNSURE, NEVER], ids=["sure", "unsure", "never"])
@pytest.mark.parametrize("batch", [1, 16])
def test_prompts_beside_the_drafts_do_not_hide_what_is_best(
    batch: int, values: Numbers, seconds: Seconds, prompts_per_token: float
) -> None:
    budget = make_budget(is_padded=True)
    world = World(budget, seconds, is_padded=True, prompts_per_token=prompts_per_token)
    world.run(4000, batch, values)
    world.run(600, batch, values)
    assert world.rate > 0.9 * world.best_rate(batch, values)


def test_what_every_step_takes_on_top_makes_drafts_pay() -> None:
    """Contexts to read and a host to wait for cost the same with many drafts as with few."""
    numbers = []
    for on_top in (0.0, 20.0):
        world = World(make_budget(is_padded=True), steep, is_padded=True, on_top=on_top)
        world.run(600, 4, SURE)
        numbers.append(world.run(200, 4, SURE)[-1].number)
        assert world.rate > 0.93 * world.best_rate(4, SURE)
    assert numbers[1] > numbers[0]


@pytest.mark.parametrize("prompts_per_token", [0.0, 0.01])
def test_few_graphs_are_captured_and_then_none(prompts_per_token: float) -> None:
    budget = make_budget(is_padded=True)
    world = World(budget, flat, is_padded=True, prompts_per_token=prompts_per_token)
    for batch in (1, 2, 3, 4, 8, 16) * 3:  # each for a moment
        world.run(8, batch, SURE)
    kinds = 1 + (prompts_per_token > 0)
    assert len(world.graphs) <= 6 * kinds + 2
    world.run(2000, 16, SURE)
    known = len(world.graphs)
    world.run(2000, 16, SURE)
    assert len(world.graphs) == known
    assert world.rate > 0.93 * world.best_rate(16, SURE)


def test_a_graph_is_captured_when_others_have_lost_what_it_takes() -> None:
    budget = make_budget(is_padded=True)
    most = np.full(4, 15)
    for number, seconds in ((0, 0.002), (3, 0.002), (7, 0.0021)):
        budget.graph_costs.start(4, 4 * (number + 1), seconds, is_off=number == 0)
    choice = budget.choose(np.arange(4), most, may_explore=False)
    assert choice.number == 15  # by what one may hope that it costs
    steps = 0
    while budget.captured(choice, most, 0, lambda other: other.number == 7).number == 7:
        steps += 1
    rates = budget.rates(most, hopes=True)
    gain = 1 - rates[1 + budget.numbers.tolist().index(7)] / rates[-1]
    assert steps == pytest.approx(CAPTURE_SECONDS / (gain * 0.0021), rel=0.1)
    # No number may take more rows than the step has.
    small = make_budget(is_padded=True, max_rows=39)
    few = small.choose(np.arange(4), most, may_explore=False)
    assert small.captured(few, most, 16, lambda other: other.number > few.number) is few


@pytest.mark.parametrize("has_other", [False, True], ids=["no-graph", "another-graph"])
def test_drafts_are_looked_at_again_where_their_graph_is_missing(has_other: bool) -> None:
    budget = make_budget(is_padded=True)
    slots, most = np.arange(16), np.full(16, 15)
    for number, seconds in ((0, 0.001), (1, 0.006), (3, 0.009)):  # it seems that none pay
        budget.graph_costs.start(16, 16 * (number + 1), seconds, is_off=number == 0)

    def has_graph(choice: DraftChoice) -> bool:
        return choice.number in ((0, 3) if has_other else (0,))

    looks = []
    for step in range(20_000):
        choice = budget.choose(slots, most, may_explore=True)
        choice = budget.captured(choice, most, 0, has_graph)
        if choice.number:
            looks.append(step)
            assert has_graph(choice) == has_other
            if not has_other:  # it is captured
                break
    assert budget.num_drafts == 0
    if has_other:
        assert np.diff(looks).max() <= RAREST_PROBE
    else:  # not before so many steps have gone by that it costs little
        assert looks[0] * 0.001 > 10 * CAPTURE_SECONDS


def test_graphs_cost_what_they_took_and_between_it_in_between() -> None:
    costs = GraphCosts(free_rows=256.0)
    for rows, seconds in ((32, 0.001), (128, 0.0016), (512, 0.004)):
        costs.start(8, rows, seconds)
    costs.start(8, 8, 0.0008, is_off=True)
    low, middle, high, highest = costs.alone(8, np.array([32, 64, 128, 512]))
    assert [low, high, highest] == pytest.approx([0.001, 0.0016, 0.004], rel=0.03)
    assert low < middle < high
    assert costs.alone(8, np.array([8]), is_off=True)[0] == pytest.approx(0.0008, rel=0.03)
    hoped = costs.hoped(8, np.array([32, 64, 128, 512]))
    assert hoped[[0, 2, 3]] == pytest.approx([low, high, highest])
    assert low < hoped[1] < middle


@given(st.integers(0, 2**31))
def test_prompts_and_what_every_step_takes_on_top_are_told_apart(seed: int) -> None:
    costs, rng = GraphCosts(free_rows=256.0), np.random.default_rng(seed)
    for rows in (64, 512):
        costs.start(8, rows, 0.001 * (1 + rows / 256))
    for _ in range(300):
        prompt_rows = int(rng.choice([0, 64, 128, 256]))
        seconds = 0.001 * (1 + 64 / 256) + 0.0004 + 0.002 * prompt_rows / 256
        costs.observe(StepRun(seconds * float(rng.uniform(0.95, 1.05)), 8, 64, prompt_rows))
        costs.observe(StepRun(None, 8, 64, prompt_rows))  # something else took time
        costs.observe(StepRun(9.0, 8, 128))  # a graph that nobody timed
    assert costs.on_top(8) == pytest.approx(0.0004, abs=0.00015)


def test_prompts_of_always_the_same_rows_cost_what_other_rows_cost() -> None:
    costs = GraphCosts(free_rows=256.0)
    for rows in (8, 64, 264, 512):
        costs.start(8, rows, 0.001 * (1 + rows / 256))
    for _ in range(300):
        costs.observe(StepRun(0.001 * (1 + (64 + 128) / 256) + 0.0003, 8, 64, 128))
    assert costs.on_top(8) == pytest.approx(0.0003, abs=0.0001)


def test_a_step_keeps_to_its_rows() -> None:
    budget = make_budget(is_padded=True, free_rows=1e6, max_rows=64)
    for batch in (1, 8, 40):
        choice = budget.choose(np.arange(batch), np.full(batch, 15), may_explore=True)
        assert batch * (choice.unshared().num_drafts + 1) <= max(64, 2 * batch)


def test_without_prompts_waiting_alone_is_another_number_tried() -> None:
    numbers = {True: set[int](), False: set[int]()}
    for may_explore, seen in numbers.items():
        budget = make_budget(is_padded=True)
        for _ in range(300):
            choice = budget.choose(np.arange(2), np.full(2, 15), may_explore=may_explore)
            seen.add(choice.unshared().num_drafts)
    assert len(numbers[False]) == 1
    assert len(numbers[True]) == 3


def test_trees_of_several_requests_share_rows() -> None:
    budget = make_budget(is_padded=True)
    assert budget.form_of(3, batch=4) == (7, 15, 3)
    assert budget.form_of(1, batch=4) == (6, 7, 1)
    assert budget.form_of(3, batch=1) == (4, 3, None)  # with nobody
    assert budget.form_of(15, batch=4).mean is None  # all have all they may have
    assert make_budget(is_padded=False).form_of(3, batch=4).mean is None
    assert make_budget(is_padded=True, nodes=None).form_of(3, batch=4) == (3, 3, None)


@given(st.integers(2, 6), st.integers(0, 100))
def test_shared_drafts_fit_into_the_rows_that_are_left(batch: int, rows: int) -> None:
    budget = make_budget(is_padded=True)
    caps = np.full(batch, 15)
    choice = DraftChoice(caps, 8, 15, np.zeros(batch), None, 7)
    fitted = budget.fitted(choice, rows)
    if 7 * batch <= rows:
        assert fitted is choice
        return
    assert fitted.mean_drafts is not None
    assert fitted[1:3] == budget.form_of(fitted.mean_drafts, batch)[:2]  # a shape that others have
    assert (fitted.caps <= fitted.num_drafts).all()
    assert fitted.mean_drafts * batch <= rows or not fitted.caps.any()
    assert budget.fitted(choice.unshared(), rows).num_drafts == 7  # the scheduler cuts those


def test_requests_share_the_rows_of_those_that_pad_their_batch() -> None:
    budget = DraftBudget(15, 15, free_rows=1e6, max_rows=2048, pad=lambda _: 16)
    for batch, each in ((16, 3), (9, 5), (2, 24)):
        assert budget._each(3, batch) == each
    assert make_budget(is_padded=False)._each(3, 2) == 3


def scored(scores: Sequence[Sequence[float]], free_rows: float) -> DraftChoice:
    """Caps by these log-probabilities, where nothing has been measured."""
    own = np.array(scores)
    nodes = DraftNodes(own, np.broadcast_to(np.arange(1, own.shape[1] + 1), own.shape))
    budget = NodeBudget(
        4,
        own.shape[1],
        free_rows=free_rows,
        max_rows=99,
        nodes=lambda _: nodes,
        depth_cost=0.0,
    )
    return budget.choose(np.arange(len(own)), np.full(len(own), own.shape[1]), may_explore=False)


def test_rows_go_to_the_most_probable_drafts_of_all_requests() -> None:
    sure, unsure, none = [-0.1, -0.2, -0.3, -0.4], [-1.0, -3.0, -5.0, -6.0], [-np.inf] * 4
    choice = scored([sure, unsure, none], free_rows=16.0)
    assert choice.caps.tolist() == [4, 1, 0]
    assert choice.expected == pytest.approx([sum(np.exp(sure)), np.exp(-1.0), 0.0], abs=0.2)
    assert scored([sure, unsure, none], free_rows=6.0).caps.tolist() == [4, 0, 0]
    assert scored([sure, unsure, none], free_rows=1e6).caps.tolist() == [4, 4, 0]
    assert scored([unsure, none], free_rows=0.1).caps.tolist() == [0, 0]


class Chains:
    """Trees without branches, of which every draft is accepted with the same probability, in steps
    whose rows cost the same wherever they are computed."""

    def __init__(self, probability: float, fixed: float, depth_cost: float, batch: int) -> None:
        self.probability, self.fixed, self.depth_cost = probability, fixed, depth_cost
        self.batch, self.depth, self.rng = batch, 0, np.random.default_rng(0)
        self.budget = NodeBudget(
            7, 7, free_rows=24.0, max_rows=2048, nodes=self.nodes, depth_cost=depth_cost
        )

    def nodes(self, slots: Counts) -> DraftNodes:
        depths = np.broadcast_to(np.arange(1, 8), (len(slots), 7))
        scores = np.log(self.probability) * depths
        return DraftNodes(np.where(depths <= self.depth, scores, -np.inf), depths)

    def seconds(self, num_drafts: float, depth: int) -> float:
        rows = self.batch * (1 + num_drafts + self.depth_cost * max(depth - 1, 0))
        return 0.001 * (self.fixed + rows)

    def run(self, steps: int) -> tuple[float, list[int]]:
        """-> tokens per second, and how deep each step drafted."""
        tokens = time = 0.0
        depths, slots = [], np.arange(self.batch)
        for _ in range(steps):
            choice = self.budget.choose(slots, np.full(self.batch, 7), may_explore=True)
            # The target walks no deeper than the step drafts.
            caps = np.minimum(choice.caps, self.depth)
            agrees = self.rng.random((self.batch, 7)) < self.probability
            walked = np.minimum(caps, choice.depth)
            accepted = np.minimum(agrees.cumprod(1).sum(1).astype(np.int64), walked)
            number = np.arange(1, 8)
            paths = np.where(number <= accepted[:, None], number, 0)[:, : max(choice.depth, 1)]
            seconds = self.seconds(caps.sum() / self.batch, choice.depth)
            run = StepRun(seconds * float(self.rng.uniform(0.95, 1.05)), self.batch)
            self.budget.observe(choice, Outcomes(caps, paths), run)
            tokens += self.batch + int(accepted.sum())
            time += seconds
            self.depth = choice.depth
            depths.append(choice.depth)
        return tokens / time, depths

    def best_rate(self) -> float:
        worth = np.r_[0.0, (self.probability ** np.arange(1, 8)).cumsum()]
        return max(self.batch * (1 + worth[d]) / self.seconds(d, d) for d in range(8))


@pytest.mark.parametrize("depth_cost", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("probability", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_trees_are_drafted_as_deep_as_pays(
    batch: int, probability: float, depth_cost: float
) -> None:
    world = Chains(probability, 8.0, depth_cost, batch)
    world.run(400)
    rate, _ = world.run(400)
    assert rate > 0.9 * world.best_rate()


def test_drafting_deep_stops_where_it_is_dear_and_is_looked_at_again() -> None:
    world = Chains(0.5, 8.0, 0.3, 4)
    _, depths = world.run(600)
    late = depths[-200:]
    assert np.median(late) <= 2
    assert 7 in late
    world.probability = 0.97
    world.run(1000)
    rate, depths = world.run(200)
    assert np.median(depths) >= 3
    assert rate > 0.9 * world.best_rate()


@pytest.mark.slow
def test_trees_that_never_pay_are_given_up_and_taken_up_again_when_they_do() -> None:
    world = Chains(0.2, 8.0, 0.3, 16)
    world.run(400)
    _, depths = world.run(400)
    assert np.mean(np.array(depths) == 0) > 0.95
    world.probability = 0.97
    world.run(5000)  # few of them look at drafts
    rate, depths = world.run(200)
    assert np.mean(np.array(depths) == 0) < 0.1
    assert rate > 0.9 * world.best_rate()


def test_requests_without_drafts_tell_nothing_of_what_drafts_are_worth() -> None:
    world = Chains(0.8, 8.0, 0.1, 2)
    world.depth = 7
    nodes = world.nodes(np.arange(2))
    nodes.scores[1] = -np.inf
    choice = DraftChoice(np.array([7, 0]), 7, 7, np.zeros(2), nodes)
    for _ in range(300):
        accepted = int((world.rng.random(7) < 0.8).cumprod().sum())
        paths = np.where(np.arange(1, 8) <= [[accepted], [0]], np.arange(1, 8), 0)
        world.budget.observe(choice, Outcomes(np.array([7, 0]), paths), StepRun(None))
    expected = 0.8 ** np.arange(1, 8)
    assert world.budget.curve.values() == pytest.approx(expected, abs=0.1)
    assert world.budget.depths.values(1)[1] == pytest.approx(expected, abs=0.25)


def test_scores_are_worth_what_they_were_worth_before() -> None:
    calibration, rng = ScoreCalibration(), np.random.default_rng(0)
    scores = -np.sort(rng.exponential(1.0, (400, 6)))
    for n in range(0, 400, 4):  # each is accepted half as often as it says
        accepted = rng.random((4, 6)) < 0.5 * np.exp(scores[n : n + 4])
        paths = np.where(accepted, np.arange(1, 7), 0)
        calibration.observe(scores[n : n + 4], Outcomes(np.full(4, 6), paths))
    at = -np.array([[0.1, 0.5, 1.0, 2.0]])
    assert calibration.values(at)[0] == pytest.approx(0.5 * np.exp(at[0]), abs=0.08)
    assert calibration.values(np.array([[-np.inf]])).tolist() == [[0.0]]


def test_what_is_not_verified_is_guessed_from_what_is() -> None:
    curve = AcceptanceCurve(8)
    before = curve.values()
    for _ in range(200):
        curve.observe(Outcomes(np.array([3]), np.array([[0, 0, 0]])))
    assert (curve.values() <= before).all()
    assert curve.values()[0] < 0.02
    assert curve.values()[7] < 0.02


def test_a_curve_counts_each_draft_by_itself() -> None:
    curve = AcceptanceCurve(4)
    for n in range(400):  # node 3 hangs on node 1
        paths = [[1, 3, 0], [1, 0, 0]] if n % 2 else [[1, 0, 0], [2, 0, 0]]
        curve.observe(Outcomes(np.array([4, 2]), np.array(paths)))
    assert curve.values() == pytest.approx([0.75, 0.36, 0.36, 0.0], abs=0.03)


def test_costs_are_what_was_measured_and_between_it_in_between() -> None:
    costs = StepCosts(free_rows=32.0)
    for _ in range(30):
        costs.observe(1, 8, 2.0)
        costs.observe(1, 32, 6.0)
        costs.observe(1, 1, 1.5, Kind.READS)
    low, middle, high = costs.estimate(1, np.array([8, 16, 32]))
    assert high / low == pytest.approx(3.0, rel=0.1)
    assert low < middle < high
    [off] = costs.estimate(1, np.array([1]), Kind.READS)
    assert low / off == pytest.approx(2.0 / 1.5, rel=0.1)
    costs.observe(1, 8, 500.0)
    costs.observe(1, 32, 6.0)
    now = costs.estimate(1, np.array([8, 32]))
    assert now[1] / now[0] == pytest.approx(3.0, rel=0.2)


def test_a_slow_machine_makes_no_step_dearer_than_another() -> None:
    costs = StepCosts(free_rows=32.0)
    for n in range(60):
        costs.observe(1, 8 if n % 2 else 32, 1.0 if n % 2 else 3.0)
    before = costs.estimate(1, np.array([8, 32]))
    for n in range(400):  # it becomes four times as slow while one kind of step runs
        costs.observe(1, 8, min(1.0 + n / 100, 4.0))
    assert costs.estimate(1, np.array([8, 32])) == pytest.approx(before)
    costs.observe(1, 32, 12.0)
    assert costs.estimate(1, np.array([8, 32])) == pytest.approx(before, rel=0.05)


def test_a_load_that_was_never_seen_is_like_the_nearest() -> None:
    costs = StepCosts(free_rows=32.0)
    for _ in range(30):
        costs.observe(4, 4, 1.0)
        costs.observe(4, 32, 10.0)
    near, far = costs.estimate(4, np.array([32])), costs.estimate(16, np.array([64]))
    assert costs.free_rows(4) < 16  # rows turned out dear
    assert costs.free_rows(16) == 32  # with more requests nothing is known
    expected = (1 + 64 / 32) / (1 + 32 / costs.free_rows(4))
    assert far / near == pytest.approx(expected, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 31), st.floats(1e-4, 1.0)), max_size=20)
)
def test_more_rows_never_cost_less(steps: list[tuple[int, int, float]]) -> None:
    costs = StepCosts(free_rows=100.0)
    for batch, drafts, seconds in steps:
        costs.observe(batch, batch * (drafts + 1), seconds)
    estimated = costs.estimate(4, np.arange(4, 200))
    assert (np.diff(estimated) >= 0).all()
    assert (estimated > 0).all()


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_falling_values_keep_their_sum(pairs: list[tuple[float, float]]) -> None:
    values, weights = np.array(pairs).T
    out = falling(values, weights)
    assert (np.diff(out) <= 1e-12).all()
    assert (out * weights).sum() == pytest.approx((values * weights).sum())
    assert falling(out, weights) == pytest.approx(out)


@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
    st.booleans(),
)
def test_no_request_gets_more_than_it_may_have(
    steps: int, most: list[int], is_padded: bool
) -> None:
    budget = make_budget(is_padded=is_padded)
    limits = np.array(most)
    for _ in range(steps):
        choice = budget.choose(np.arange(len(limits)), limits, may_explore=True)
        assert (choice.caps <= limits).all()
        assert (choice.caps <= choice.num_drafts).all()
        assert choice.depth <= budget.max_depth
        assert (choice.depth == 0) == (choice.num_drafts == 0)

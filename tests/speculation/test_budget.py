"""The budget finds the number of drafts with the most tokens per second, and follows the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.speculation.budget import (
    AcceptanceCurve,
    Counts,
    DraftBudget,
    DraftChoice,
    DraftForm,
    Numbers,
    Outcomes,
    ScoreCalibration,
    StepCosts,
    StepTimer,
    falling,
)

Seconds = Callable[[int, int], float]  # requests, rows
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
    """Drafts that are accepted with given probabilities, in steps that cost what they cost."""

    def __init__(self, budget: DraftBudget, seconds: Seconds, *, is_padded: bool) -> None:
        self.budget, self.seconds, self.is_padded = budget, seconds, is_padded
        self.rng = np.random.default_rng(0)
        self.time = self.tokens = 0.0
        self.pace = 1.0  # of a machine that others use, too
        self.num_there: Counts | None = None  # drafts that the last step made

    def run(self, steps: int, batch: int, values: Numbers) -> list[DraftChoice]:
        """The first draft that is not accepted ends the path: of a chain, that is."""
        made, self.time, self.tokens = [], 0.0, 0.0
        size = len(values)
        before = np.r_[1.0, values[:-1]]
        conditional = np.where(before > 0, values / np.maximum(before, 1e-9), 0.0)
        for _ in range(steps):
            choice = self.budget.choose(np.arange(batch), np.full(batch, size), may_explore=True)
            there = 0 if self.num_there is None else size
            caps = np.minimum(choice.unshared().caps, there)  # all are as probable as each other
            agrees = self.rng.random((batch, size)) < conditional
            accepted = np.minimum(agrees.cumprod(1).sum(1).astype(np.int64), caps)
            number = np.arange(1, size + 1)
            paths = np.where(number <= accepted[:, None], number, 0)
            rows = batch + int(caps.sum())
            if self.is_padded:
                rows = batch * (choice.unshared().num_drafts + 1)
            seconds = self.seconds(batch, rows) + 0.1 * (choice.depth > 0)
            self.budget.observe(choice, Outcomes(caps, paths), seconds * self.noise())
            self.num_there = caps if choice.depth else None
            self.time += seconds
            self.tokens += batch + float(accepted.sum())
            made.append(choice)
        return made

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
        numbers = [0, *self.budget.numbers.tolist()]
        seconds = [self.seconds(batch, batch * (n + 1)) + 0.1 * (n > 0) for n in numbers]
        return max(batch * (1 + worth[n]) / s for n, s in zip(numbers, seconds, strict=True))


def make_budget(
    *,
    is_padded: bool,
    free_rows: float = 24.0,
    max_rows: int = 2048,
    nodes: int | None = 15,
    timer: StepTimer = lambda batch, form: None,
) -> DraftBudget:
    pad = (lambda batch: batch) if is_padded else None
    return DraftBudget(15, nodes, free_rows=free_rows, max_rows=max_rows, pad=pad, timer=timer)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("values", [SURE, UNSURE, NEVER], ids=["sure", "unsure", "never"])
@pytest.mark.parametrize("batch", [1, 16])
def test_it_comes_near_to_the_best_fixed_number(
    batch: int, values: Numbers, seconds: Seconds, is_padded: bool
) -> None:
    world = World(make_budget(is_padded=is_padded), seconds, is_padded=is_padded)
    world.run(400, batch, values)
    world.run(600, batch, values)
    assert world.rate > 0.93 * world.best_rate(batch, values)


@pytest.mark.parametrize("is_padded", [False, True])
def test_it_follows_the_load(is_padded: bool) -> None:
    world = World(make_budget(is_padded=is_padded), flat, is_padded=is_padded)
    numbers = []
    for batch in (1, 64, 1):
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


@pytest.mark.parametrize("seconds", [flat, steep])
@pytest.mark.parametrize("values", [SURE, UNSURE, NEVER], ids=["sure", "unsure", "never"])
@pytest.mark.parametrize("batch", [1, 16])
def test_steps_that_are_timed_by_themselves_need_not_be_met(
    batch: int, values: Numbers, seconds: Seconds
) -> None:
    """Where prompts come with every step, none shows what its drafts alone cost."""
    timed: list[int] = []

    def timer(requests: int, form: DraftForm) -> float:
        number = form.num_drafts if form.mean is None else form.mean
        timed.append(number)
        return 0.01 * (seconds(requests, requests * (number + 1)) + 0.1 * (number > 0))

    budget = make_budget(is_padded=True, timer=timer)
    observe = budget.observe
    budget.observe = lambda choice, outcomes, _=None: observe(choice, outcomes)  # type: ignore
    world = World(budget, seconds, is_padded=True)
    world.run(300, batch, values)
    world.run(300, batch, values)
    assert world.rate > 0.93 * world.best_rate(batch, values)
    assert len(timed) == len(set(timed))


def test_a_number_of_requests_that_is_soon_another_has_nothing_timed() -> None:
    timed: list[int] = []

    def timer(batch: int, form: DraftForm) -> float:
        timed.append(batch)
        return 0.01

    budget = make_budget(is_padded=True, timer=timer)
    for batch in [1, 2, 3, 4] * 10:
        budget.choose(np.arange(batch), np.full(batch, 15), may_explore=True)
    assert not timed
    for _ in range(64):
        budget.choose(np.arange(4), np.full(4, 15), may_explore=False)
    assert set(timed) == {4}


def test_what_was_learned_before_a_step_was_timed_keeps_its_relations() -> None:
    costs = StepCosts(24.0)
    for _ in range(200):
        for rows, seconds in ((16, 1.0), (64, 3.0)):
            costs.observe(4, rows, seconds)
    before = costs.estimate(4, np.array([16, 64]))
    costs.start(4, 16, 0.002)
    after = costs.estimate(4, np.array([16, 64]))
    assert after[0] == pytest.approx(0.002, rel=0.01)
    assert after[1] / after[0] == pytest.approx(before[1] / before[0], rel=0.02)
    costs.start(4, 64, 0.005)
    assert costs.estimate(4, np.array([16, 64])) == pytest.approx([0.002, 0.005], rel=0.01)


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
    budget = DraftBudget(4, own.shape[1], free_rows=free_rows, max_rows=99, scores=lambda _: own)
    return budget.choose(np.arange(len(own)), np.full(len(own), own.shape[1]), may_explore=False)


def test_rows_go_to_the_most_probable_drafts_of_all_requests() -> None:
    sure, unsure, none = [-0.1, -0.2, -0.3, -0.4], [-1.0, -3.0, -5.0, -6.0], [-np.inf] * 4
    choice = scored([sure, unsure, none], free_rows=16.0)
    assert choice.caps.tolist() == [4, 1, 0]
    assert choice.expected == pytest.approx([sum(np.exp(sure)), np.exp(-1.0), 0.0], abs=0.2)
    assert scored([sure, unsure, none], free_rows=6.0).caps.tolist() == [4, 0, 0]
    assert scored([sure, unsure, none], free_rows=1e6).caps.tolist() == [4, 4, 0]
    assert scored([unsure, none], free_rows=0.1).caps.tolist() == [0, 0]


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
        costs.observe(1, 1, 1.5, is_off=True)
    low, middle, high = costs.estimate(1, np.array([8, 16, 32]))
    assert high / low == pytest.approx(3.0, rel=0.1)
    assert low < middle < high
    [off] = costs.estimate(1, np.array([1]), is_off=True)
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
    assert far / near == pytest.approx((1 + 64 / 32) / (1 + 32 / 32), rel=0.01)


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

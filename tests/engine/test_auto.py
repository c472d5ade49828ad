"""Steps that verify as many drafts as pay: the answers do not depend on how many those are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.engine import Engine, Speculation
from peagle.engine.request import Request
from peagle.engine.runner import Report, Runner
from peagle.engine.scheduler import Schedule, Slot
from peagle.engine.step import StepShape
from peagle.errors import ConfigError
from peagle.models.drafter import Drafter, SequenceDraft
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation import budget as budget_module
from peagle.speculation.budget import DraftBudget, DraftChoice, DraftForm, Outcomes
from peagle.speculation.costs import Counts, StepRun
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

PARAMS = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=14),
    SamplingParams(seed=3, top_k=9, temperature=0.8, max_tokens=14),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.6, logprobs=2),
    SamplingParams(seed=2, temperature=0.7, max_tokens=9, num_speculative_tokens=0),
]


class AnyChoice(DraftBudget):
    """Chooses at random; learns as ever."""

    rng: random.Random

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        super().choose(slots, most, may_explore=may_explore)
        if self.rng.random() < 0.25:
            return DraftChoice(np.zeros_like(most), 0, 0, np.zeros(len(most)))
        size = self.max_nodes or self.max_depth
        number = self.rng.randint(0 if self.max_nodes else 1, size)
        caps = [self.rng.randint(0, min(n, number)) for n in most.tolist()]
        depth = self.rng.randint(1, self.max_depth)
        if self.max_nodes is None:
            number = depth = max(number, *caps, 1)
        mean = None
        if self._pad is not None and self.max_nodes and self.rng.random() < 0.5:
            mean = self.rng.randint(number // 2, number)
        none = np.zeros(len(most))
        return DraftChoice(np.array(caps, dtype=np.int64), depth, number, none, None, mean)

    def gain(self, batch: int, answer: int, prompt: int = 0, again: int = 0) -> float:
        return self.rng.choice((0.5, 2.0))


class Scripted(DraftBudget):
    """Chooses what it is told, step by step, then the last of it."""

    script: list[tuple[int, int, int]]  # cap, depth, drafts

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        cap, depth, number = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        return DraftChoice(np.minimum(most, cap), depth, number, np.zeros(len(most)))

    def gain(self, batch: int, answer: int, prompt: int = 0, again: int = 0) -> float:
        return 2.0


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


def jobs_of(count: int, seed: int = 1) -> list[Job]:
    texts = prompts(count, seed=seed)
    return [Job(p, PARAMS[(n + seed) % len(PARAMS)], joins=n // 2) for n, p in enumerate(texts)]


def drafter_named(name: str, jobs: list[Job]) -> Drafter:
    answers = naive.known(target(), jobs)
    if name == "trees":
        return drafters.ScriptedTrees(SHALLOW.make_head(target()), answers, (0, 1, 2, 7))
    if name == "beam trees":
        return drafters.ScriptedBeam(SHALLOW.make_head(target(), "eagle3"), answers, (0, 1, 2, 7))
    if name == "n-gram trees":
        return NgramDrafter(1, 3)
    if name == "host":
        return drafters.mixed(answers)
    return drafters.ScriptedHead(SHALLOW.make_head(target(), name), drafters.Script(answers))


def any_choice(engine: Engine, seed: int) -> None:
    assert engine.budget is not None
    engine.budget.__class__ = AnyChoice
    assert isinstance(engine.budget, AnyChoice)
    engine.budget.rng = random.Random(seed)


@both_forms
@pytest.mark.parametrize("name", ["trees", "beam trees", "n-gram trees", "p-eagle", "host"])
def test_any_number_of_drafts_at_any_step_leaves_the_answers_alone(name: str, static: bool) -> None:
    jobs = jobs_of(6)
    nodes, num_accepted = 12 if name.endswith("trees") else None, 0
    for seed in range(2):
        engine = engines.make_engine(
            target(), drafter_named(name, jobs), 4, static=static, nodes=nodes, auto=True
        )
        any_choice(engine, seed)
        naive.check(target(), engines.run(engine, jobs), jobs)
        num_accepted += engine.stats.num_accepted_tokens
    assert num_accepted > 0 or name == "n-gram trees"  # few tokens repeat themselves here


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    st.integers(0, 1000),
    st.integers(2, 6),
    st.integers(1, 20),
    st.integers(40, 90),
    st.sampled_from(["trees", "beam trees", "p-eagle", "eagle3"]),
)
def test_any_choice_under_preemption_leaves_the_answers_alone(
    seed: int, k: int, nodes: int, room: int, name: str
) -> None:
    jobs = jobs_of(4, seed)
    drafter = drafter_named(name, jobs)
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 36}
    room += 46 if name == "beam trees" else nodes
    options |= engines.room_for(room, target(), drafter)
    for static in (False, True):
        engine = engines.make_engine(
            target(),
            drafter,
            k,
            static=static,
            nodes=nodes if name.endswith("trees") else None,
            auto=True,
            **options,
        )
        any_choice(engine, seed)
        naive.check(target(), engines.run(engine, jobs), jobs)


@both_forms
@pytest.mark.parametrize("name", ["trees", "beam trees", "n-gram trees", "eagle3"])
def test_the_engines_own_choice_leaves_the_answers_alone(name: str, static: bool) -> None:
    jobs = jobs_of(6, seed=3)
    nodes = 12 if name.endswith("trees") else None
    drafter = drafter_named(name, jobs)
    engine = engines.make_engine(target(), drafter, 4, static=static, nodes=nodes, auto=True)
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    stats = engine.stats
    assert stats.num_offered_tokens >= stats.num_draft_tokens > 0
    assert stats.num_expected_tokens > 0
    assert sum(r.stats.num_offered_tokens for r in requests) == stats.num_offered_tokens
    own = sum(r.stats.num_expected_tokens for r in requests)
    assert own == pytest.approx(stats.num_expected_tokens)


@both_forms
@pytest.mark.parametrize(
    ("name", "nodes"), [("p-eagle", None), ("p-eagle", 9), ("eagle3", None), ("eagle3", 9)]
)
def test_a_drafter_that_paused_drafts_what_it_would_have_drafted(
    name: str, nodes: int | None, static: bool
) -> None:
    """Its cache was kept up to date, prompts included."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=20)) for p in prompts(3, seed=4)]
    size = nodes or 4
    awake, paused = (0, 4, size), (0, 0, 0)
    found = []
    for pause in ([awake] * 6, [paused] * 6, [awake, paused, awake, paused, paused, paused]):
        drafter = head_drafter(SHALLOW.make_head(target(), name))
        engine = engines.make_engine(target(), drafter, 4, static=static, nodes=nodes, auto=True)
        assert engine.budget is not None
        engine.budget.__class__ = Scripted
        assert isinstance(engine.budget, Scripted)
        engine.budget.script = [*pause, awake]
        for n, job in enumerate(jobs):
            engine.add_request(str(n), job.prompt, job.params)
        for _ in range(9):
            engine.step()
        state = engine.runner.models.state
        assert int(state.num_drafts[:3].min()) > 0
        found.append((state.num_computed.tolist(), state.drafts[:3].tolist()))
    assert found[1] == found[0]
    assert found[2] == found[0]


@both_forms
def test_trees_from_the_host_are_walked_as_deep_as_they_were_drafted(static: bool) -> None:
    """A chain that repeats itself: all of a tree's few nodes stand behind each other."""
    prompt = [1, 2, 3] * 4
    job = Job(prompt, SamplingParams(temperature=0.0, max_tokens=30))
    engine = engines.make_engine(
        target(), NgramDrafter(1, 3), 12, static=static, nodes=15, auto=True
    )
    assert engine.budget is not None
    assert [engine.budget.form_of(n, 1).depth for n in (1, 7, 15)] == [12] * 3
    seen = []
    propose = engine._host_drafter.propose_trees  # type: ignore[union-attr]

    def right(histories: list[list[int]], counts: list[int], depths: list[int]) -> object:
        assert propose(histories, counts, depths)
        known = naive.known(target(), [job])[0][len(histories[0]) :][: min(counts[0], depths[0])]
        seen.append(len(known))
        scores = [-0.01 * n for n in range(len(known))]
        return [SequenceDraft(known, None, list(range(len(known))), scores)]

    engine._host_drafter.propose_trees = right  # type: ignore[union-attr]
    [request] = engines.run(engine, [job])
    naive.check(target(), [request], [job])
    assert max(seen) == 12
    shapes = [s for s in engines.watched(engine).shapes if s.num_nodes]
    assert all(s.depth == 12 for s in shapes)
    assert request.stats.num_accepted_tokens == request.stats.num_draft_tokens


def test_steps_without_drafts_do_not_sample_from_the_drafter() -> None:
    job = Job(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=6))
    engine = engines.make_engine(
        target(), head_drafter(SHALLOW.make_head(target())), 4, nodes=9, auto=True
    )
    assert engine.budget is not None
    engine.budget.__class__ = Scripted
    assert isinstance(engine.budget, Scripted)
    engine.budget.script = [(0, 0, 0)]
    [request] = engines.run(engine, [job])
    assert request.stats.num_drafts == 0
    shapes = engines.watched(engine).shapes
    assert all(shape.feeds and shape.depth == 0 for shape in shapes)


def paths_of(engine: Engine, seen: list[tuple[int, list[int]]]) -> None:
    assert engine.budget is not None
    observe = engine.budget.observe

    def watch(choice: DraftChoice, outcomes: Outcomes, run: StepRun) -> None:
        counts, paths = outcomes.num_drafts.tolist(), outcomes.paths.tolist()
        seen.extend((n, [x for x in path if x]) for n, path in zip(counts, paths, strict=True))
        observe(choice, outcomes, run)

    engine.budget.observe = watch  # type: ignore[method-assign]


@both_forms
def test_what_is_learned_are_the_nodes_that_were_accepted(static: bool) -> None:
    """The right token is always the second candidate: node 1 is never on the path."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=30)) for p in prompts(2, seed=3)]
    drafter = drafters.ScriptedTrees(
        SHALLOW.make_head(target()), naive.known(target(), jobs), ranks=(1,)
    )
    engine = engines.make_engine(target(), drafter, 3, static=static, nodes=20, auto=True)
    seen: list[tuple[int, list[int]]] = []
    paths_of(engine, seen)
    requests = engines.run(engine, jobs)
    accepted = sum(len(path) for _, path in seen)
    assert accepted == pytest.approx(engine.stats.num_accepted_tokens, abs=6)  # ends are cut
    assert accepted > 0
    for count, path in seen:
        assert path == sorted(path)
        assert all(1 < node <= count for node in path)
    naive.check(target(), requests, jobs)


@both_forms
def test_an_unsure_request_has_fewer_drafts_than_a_sure_one(static: bool) -> None:
    """Rows are shared by the nodes' probabilities: by the host, or by the device itself."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=40)) for p in prompts(2, seed=3)]

    class OneSure(drafters.ScriptedTrees):
        def _candidates(self, prompt: Sequence[int], position: int) -> list[int]:
            tokens = super()._candidates(prompt, position)
            return tokens[:1] if prompt == jobs[0].prompt else tokens

    drafter = OneSure(SHALLOW.make_head(target()), naive.known(target(), jobs), (0,))
    engine = engines.make_engine(target(), drafter, 4, static=static, nodes=12, auto=True)
    assert engine.budget is not None
    if static:
        engine.budget.form_of = lambda *_: DraftForm(4, 12, 2)  # type: ignore[method-assign]
    seen: list[tuple[int, list[int]]] = []
    paths_of(engine, seen)
    sure, unsure = engines.run(engine, jobs)
    naive.check(target(), [sure, unsure], jobs)
    if static:  # four nodes of one request take both places of two
        assert (2, [1, 1, 2, 2]) in seen
        assert all(place <= count for count, path in seen for place in path)
    assert any(shape.mean_nodes for shape in engines.watched(engine).shapes) == static
    assert sure.stats.mean_acceptance_length > unsure.stats.mean_acceptance_length


def test_a_step_that_found_no_drafts_tells_nothing_of_their_worth() -> None:
    """The drafter has paused: there are none before it has drafted again."""
    jobs = [Job(p, GREEDY) for p in prompts(3, seed=4)]
    drafter = drafter_named("trees", jobs)
    engine = engines.make_engine(target(), drafter, 4, static=True, nodes=12, auto=True)
    assert engine.budget is not None
    engine.budget.__class__ = Scripted
    assert isinstance(engine.budget, Scripted)
    engine.budget.script = [(0, 0, 0)] * 4 + [(12, 4, 12)]
    choose = engine.budget.choose
    engine.budget.choose = lambda *args, **options: (  # type: ignore[method-assign]
        choose(*args, **options)._replace(mean_drafts=2)
    )
    seen: list[tuple[int, list[int]]] = []
    paths_of(engine, seen)
    naive.check(target(), engines.run(engine, jobs), jobs)
    counts = [count for count, _ in seen]
    first = next(n for n, count in enumerate(counts) if count)
    assert first == 3 * (3 + 1)  # of three requests, the first step with drafts having none
    assert set(counts[first:]) == {0, 3}  # 4 x 2 for three; 0: those that have ended
    assert not any(path for count, path in seen if not count)


def test_shared_rows_leave_prompts_theirs() -> None:
    """While prompts wait, drafts have half of a step's rows."""
    jobs = [Job(p, GREEDY, joins=n // 2 * 3) for n, p in enumerate(prompts(6, seed=2))]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    drafter = drafter_named("trees", jobs)
    engine = engines.make_engine(target(), drafter, 4, static=True, nodes=12, auto=True, **options)
    assert engine.budget is not None
    engine.budget._review = lambda _: setattr(engine.budget, "num_drafts", 7)  # type: ignore
    engine.budget._explored = lambda: 7  # type: ignore[method-assign]
    schedule, seen = engine.scheduler.schedule, set()

    def watched() -> Schedule:
        made = schedule()
        assert made.drafts is not None
        mean = made.drafts.mean_drafts or 0
        num_rows = len(made.slots) + mean * len(made.drafts.caps)
        assert num_rows + sum(c.num_rows for c in made.chunks) <= 24
        seen.add((len(made.drafts.caps), mean))
        return made

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    naive.check(target(), engines.run(engine, jobs), jobs)
    assert (2, 7) in seen
    assert any(0 < mean < 7 for _, mean in seen)


def resting_engine(gains: Sequence[float], **options: Any) -> Engine:
    """`gains`: what drafts would gain whenever it is asked, then the last of them."""
    drafter = head_drafter(SHALLOW.make_head(target()))
    engine = engines.make_engine(target(), drafter, 4, nodes=9, auto=True, **options)
    assert engine.budget is not None
    told = [*gains]
    engine.budget.gain = lambda *_, **__: told[0] if len(told) == 1 else told.pop(0)  # type: ignore
    return engine


def test_requests_that_start_while_no_drafts_pay_are_left_to_the_target() -> None:
    """But the first, which shows whether that is still so. Nothing is drafted for the others, and
    the drafter does not read what they write."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=12)) for p in prompts(4, seed=5)]
    engine = resting_engine([0.5])
    first, *others = engines.run(engine, jobs)
    naive.check(target(), [first, *others], jobs)
    assert first.stats.num_drafts > 0
    assert all(r.stats.num_drafts == 0 and r.stats.num_offered_tokens == 0 for r in others)
    engines.watched(engine).shapes.clear()
    naive.check(target(), engines.run(engine, jobs[1:]), jobs[1:])
    shapes = engines.watched(engine).shapes
    assert shapes
    assert not any(shape.depth or shape.feeds for shape in shapes)


def test_requests_have_drafts_again_when_these_pay() -> None:
    """Those that may still write more than has to be computed again for it; each once."""
    texts = prompts(4, seed=5)
    lengths = [60, 60, 60, len(texts[3])]
    jobs = [
        Job(p, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        for p, n in zip(texts, lengths, strict=True)
    ]
    engine = resting_engine([0.5] * 3 + [1.05, 2.0])
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert [r.num_preemptions for r in requests] == [0, 1, 1, 0]
    assert [r.stats.num_offered_tokens > 0 for r in requests] == [True, True, True, False]


def test_a_request_that_has_come_back_rests_no_more() -> None:
    [text, other] = prompts(2, seed=5)
    job = Job(text, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine = resting_engine([0.5, 2.0, 0.5], block_size=4)
    engines.run(engine, [Job(other, GREEDY)])  # the first never rests
    starts, opened = list[int](), engine.scheduler._open

    def watched(request: Request, limit: int, num_cached: int) -> Slot:
        starts.append(num_cached)
        return opened(request, limit, num_cached)

    engine.scheduler._open = watched  # type: ignore[method-assign]
    [request] = engines.run(engine, [job])
    naive.check(target(), [request], [job])
    assert (request.num_preemptions, request.rests) == (1, False)
    assert starts == [0, 0]  # the drafter has not read what its own blocks hold


def test_rows_of_requests_that_rest_are_not_taken_for_the_drafters() -> None:
    """With drafts again, a request does not begin with blocks that the drafter has not read."""
    prompt = [n % 30 + 1 for n in range(40)]
    job = Job(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    engine = resting_engine([0.5], block_size=4)
    alone = engines.run(resting_engine([2.0], block_size=4), [job])[0]
    engines.run(engine, [Job([1, 2], GREEDY)])  # the first never rests
    resting, again = (engines.run(engine, [job])[0] for _ in range(2))
    assert again.num_cached_tokens > resting.num_cached_tokens == 0
    engine.budget.gain = lambda *_, **__: 2.0  # type: ignore[method-assign, union-attr]
    awake, again = (engines.run(engine, [job])[0] for _ in range(2))
    assert again.num_cached_tokens > awake.num_cached_tokens == 0
    for request in (awake, again):
        assert request.stats.num_accepted_tokens == alone.stats.num_accepted_tokens
    naive.check(target(), [resting, awake, again], [job] * 3)


@both_forms
def test_requests_rest_where_rows_are_exact_and_the_drafter_has_a_cache(static: bool) -> None:
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=8)) for p in prompts(3, seed=4)]
    for name in ("n-gram trees", "p-eagle"):
        drafter = drafter_named(name, jobs)
        nodes = 9 if name.endswith("trees") else None
        engine = engines.make_engine(target(), drafter, 4, static=static, nodes=nodes, auto=True)
        engine.budget.gain = lambda *_, **__: 0.5  # type: ignore[method-assign, union-attr]
        requests = engines.run(engine, jobs)
        assert [r.rests for r in requests] == [False] + [name == "p-eagle" and not static] * 2


def test_rejection_keeps_a_fixed_number_of_drafts() -> None:
    with pytest.raises(ConfigError, match="by coupling, not by rejection"):
        Speculation(head_drafter(SHALLOW.make_head(target())), 4, "rejection", is_auto=True)


def test_warming_up_takes_the_shapes_of_every_choice() -> None:
    jobs = [Job(p, GREEDY, joins=n) for n, p in enumerate(prompts(8, seed=1))]
    drafter = drafter_named("trees", jobs)
    engine = engines.make_engine(target(), drafter, 4, static=True, nodes=12, auto=True)
    common = set(engine.runner._common_shapes(engine._common_drafts, 2048))
    engines.run(engine, jobs)
    met = {s for s in engines.watched(engine).shapes if s.num_items == 0 and not s.feeds}
    assert met <= common
    assert {s.num_nodes for s in common if s.num_items == 0} == {1, 3, 5, 7, 12}
    with_prompts = {(s.batch, s.num_items): s.num_nodes for s in common if s.num_items}
    assert len(with_prompts) == len({s for s in common if s.num_items})


@pytest.mark.parametrize("captures", [False, True])
def test_steps_that_had_to_be_captured_tell_nothing_of_costs(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a graph is captured the device waits, which says nothing of the step's cost."""
    counter = itertools.count()
    monkeypatch.setattr(Runner, "num_graphs", property(lambda _: next(counter) if captures else 0))
    jobs = [Job(p, GREEDY) for p in prompts(4, seed=1)]
    engine = engines.make_engine(
        target(), drafter_named("trees", jobs), 4, static=True, nodes=12, auto=True
    )
    any_choice(engine, 1)
    assert engine.budget is not None
    observe, told = engine.budget.observe, list[StepRun]()

    def watch(choice: DraftChoice, outcomes: Outcomes, run: StepRun) -> None:
        told.append(run)
        observe(choice, outcomes, run)

    engine.budget.observe = watch  # type: ignore[method-assign]
    engines.run(engine, jobs)
    assert told
    assert all((run.seconds is None) == captures for run in told)
    assert any(run.prompt_rows for run in told)


class Graphs:
    """As if steps were graphs: which shapes have been captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[StepShape] = []  # each once
        self.caps: list[Sequence[int]] = []  # of each step that the host takes no part in
        run = Runner.run

        def capture(runner: Runner, shape: StepShape) -> None:
            assert shape not in self.captured
            self.captured.append(shape)
            assert runner.on_capture is not None
            runner.on_capture(shape, 0.001 * (1 + shape.decode_rows / 64))

        def run_captured(runner: Runner, shape: StepShape, *rest: Any) -> Report:
            _, caps, chunks, host = rest
            padded = runner.padded_shape(shape, chunks)
            if host is None:
                self.caps.append(caps)
                if padded not in self.captured:
                    capture(runner, padded)
            return run(runner, shape, *rest)

        monkeypatch.setattr(Runner, "has_graphs", True)
        monkeypatch.setattr(Runner, "has_graph", lambda _, shape: shape in self.captured)
        monkeypatch.setattr(Runner, "num_graphs", property(lambda _: len(self.captured)))
        monkeypatch.setattr(Runner, "capture", capture)
        monkeypatch.setattr(Runner, "run", run_captured)


@pytest.mark.parametrize("name", ["trees", "p-eagle", "host"])
def test_choices_that_stand_in_for_others_leave_the_answers_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(8)
    engine = engines.make_engine(
        target(),
        drafter_named(name, jobs),
        4,
        static=True,
        nodes=12 if name == "trees" else None,
        auto=True,
    )
    any_choice(engine, 3)
    graphs, budget = Graphs(monkeypatch), engine.budget
    assert budget is not None
    captured, stood_in = budget.captured, list[DraftChoice | None]()

    def watch(choice: DraftChoice, *rest: Any) -> DraftChoice:
        chosen = captured(choice, *rest)
        stood_in.append(None if chosen is choice else chosen)
        return chosen

    budget.captured = watch  # type: ignore[method-assign]
    budget._rates = dict.fromkeys([0, *budget.numbers.tolist()], 1.0)
    naive.check(target(), engines.run(engine, jobs), jobs)
    assert any(stood_in)
    assert not all(stood_in)
    assert len(graphs.captured) < len(stood_in)
    for chosen, caps in zip(stood_in, graphs.caps, strict=True):
        if chosen is not None:  # what comes with its prompt has no drafts yet
            own, joined = caps[: len(chosen.caps)], caps[len(chosen.caps) :]
            assert own.tolist() == chosen.caps.tolist()
            assert not any(joined)


@pytest.mark.parametrize("name", ["trees", "p-eagle", "host"])
def test_what_is_timed_is_what_is_chosen_without_its_prompts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(p, GREEDY, joins=9 * n) for n, p in enumerate(prompts(8, seed=1))]
    engine = engines.make_engine(
        target(),
        drafter_named(name, jobs),
        4,
        static=True,
        nodes=12 if name == "trees" else None,
        auto=True,
    )
    monkeypatch.setattr(budget_module, "REVIEW_STEPS", 1)
    graphs = Graphs(monkeypatch)
    naive.check(target(), engines.run(engine, jobs), jobs)
    assert engine.budget is not None
    timed = engine.budget.graph_costs._timed
    pure = [s for s in graphs.captured if not s.num_items and (s.depth or s.feeds)]
    assert set(timed) == {(s.batch, s.decode_rows, s.feeds) for s in pure}
    assert any(s.num_items for s in graphs.captured)
    assert engine.budget.graph_costs._num_steps > 0

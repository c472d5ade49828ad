"""Numbers of drafts that change from step to step, known blocks, grammars and corrections, all at
once: answers are those of plain decoding, and known blocks hold what their tokens give."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from peagle.engine.engine import Engine, Speculation
from peagle.engine.request import Request
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.ngram import NgramDrafter
from peagle.sampling_params import SamplingParams, StructuredOutputsParams
from peagle.speculation.budget import DraftChoice, Outcomes
from peagle.speculation.costs import StepRun
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, grammar_of
from tests.tiny.models import SHALLOW, head_drafter

from .test_auto import Scripted, any_choice
from .test_prefix_caching import check_known_blocks, poison
from .test_structured_outputs import EOS, greedy, jobs_of, target

CONTEXT = 64  # of the engine
GRAMMARS = [
    StructuredOutputsParams(regex=r"(ab|the){2,7}c?\d"),
    StructuredOutputsParams(choice=["the cab", "the abc", "a"]),
    StructuredOutputsParams(grammar='root ::= "ab" root "c" | [0-9]'),
]
HEADS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {},
    "corrected chain": {"correction_size": 20},
    "corrected tree": {"correction_size": 20},
    "eagle3": {"method": "eagle3"},
    "eagle3 tree": {"method": "eagle3"},
    "few positions": {"max_position_embeddings": 24},
}


class Turns(NamedTuple):
    """A request and, once it has ended, one that goes on from its answer."""

    first: Job
    second: Job


class Setting(NamedTuple):
    name: str  # of the drafter
    is_auto: bool
    static: bool
    prefix_caching: bool
    block_size: int
    spare: int  # tokens that the caches have room for beyond the longest request
    max_rows: int  # of a step
    seed: int


SETTINGS = st.builds(
    Setting,
    name=st.sampled_from([*HEADS, "n-gram", "n-gram tree", "scripted"]),
    is_auto=st.booleans(),
    static=st.booleans(),
    prefix_caching=st.sampled_from([True, True, False]),
    block_size=st.sampled_from([1, 2, 3, 5]),
    spare=st.integers(0, 50),
    max_rows=st.sampled_from([9, 64]),
    seed=st.integers(0, 9999),
)


@cache
def network(name: str) -> EagleNetwork:
    return SHALLOW.make_head(target(), **{"max_position_embeddings": 96} | HEADS[name])


def drafter_named(name: str, answers: list[list[int]]) -> Drafter:
    """Most are right now and then; those with a correction are as good as it makes them."""
    if name.startswith("n-gram"):
        return NgramDrafter(1, 3)
    if name == "scripted":
        return drafters.mixed(answers)
    if name.endswith("tree"):
        kind = drafters.ScriptedBeam if name == "eagle3 tree" else drafters.ScriptedTrees
        return kind(network(name), answers, ranks=(0, 1, 2, 9))
    if name == "corrected chain":
        return head_drafter(network(name))
    return drafters.ScriptedHead(network(name), drafters.Script(answers))


def any_params(rng: random.Random) -> SamplingParams:
    extras: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"repetition_penalty": 1.4},
        {"num_speculative_tokens": rng.choice((0, 2))},
        *({"structured_outputs": wanted} for wanted in GRAMMARS),
    ]
    own: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.4:
        own = {"seed": rng.randrange(9), "top_k": rng.choice((0, 9))}
    return SamplingParams(max_tokens=rng.choice((1, 5, 20, 20)), **own | rng.choice(extras))


def any_turns(rng: random.Random, count: int) -> list[Turns]:
    def tokens(most: int) -> list[int]:
        return [rng.randrange(1, 200) for _ in range(rng.randint(1, most))]

    beginnings, turns = [tokens(16), tokens(16)], []
    for n in range(count):
        prompt = rng.choice(beginnings)[: rng.randint(0, 16)] + tokens(3)
        first = Job(prompt, any_params(rng), joins=n // 2, eos=EOS)
        known = prompt + naive.answer(target(), first)
        turns.append(Turns(first, Job(known + tokens(3), any_params(rng), eos=EOS)))
    return turns


class Conversations:
    """Runs turns, of which a few are given up, and looks at everything on the way."""

    def __init__(self, engine: Engine, turns: list[Turns], net: EagleNetwork | None) -> None:
        self.engine, self.turns, self.net = engine, turns, net
        self.sequences = naive.known(target(), [job for pair in turns for job in pair])
        self.asked: list[tuple[Job, Request]] = []

    def run(self, rng: random.Random, abort_rate: float = 0.0) -> None:
        to_come, followed = list(self.turns), dict[str, Job]()
        steps = 0
        while to_come or followed or self.engine.has_unfinished:
            assert steps < 600, "the engine makes no progress"
            for pair in [p for p in to_come if p.first.joins <= steps]:
                to_come.remove(pair)
                followed[self._ask(pair.first).request_id] = pair.second
            ended = {r.request_id for _, r in self.asked if r.finish_reason is not None}
            for request_id in ended & followed.keys():
                self._ask(followed.pop(request_id))
            self.engine.step()
            if rng.random() < abort_rate:
                self.engine.abort_request(rng.choice(self.asked)[1])
            self._check(steps)
            steps += 1
        self._check(0)
        assert engines.is_idle(self.engine)

    def _ask(self, job: Job) -> Request:
        request = self.engine.add_request(
            str(len(self.asked)), job.prompt, job.params, grammar=grammar_of(job.params)
        )
        self.asked.append((job, request))
        return request

    def _check(self, steps: int) -> None:
        requests = [request for _, request in self.asked]
        self.engine.allocator.check([r.table for r in requests if r.table is not None])
        self.engine.allocator.check_prefixes()
        if steps % 8 == 0:
            check_known_blocks(self.engine, self.sequences, self.net)

    def check_answers(self) -> None:
        for job, request in self.asked:
            answer = naive.answer(target(), job)
            if request.finish_reason == "abort":
                answer = answer[: request.num_outputs]
            assert request.output_token_ids == answer
            if job.params.logprobs is not None:
                assert [x.token_ids[0] for x in request.logprobs] == answer


def watch_budget(engine: Engine) -> None:
    """What it learns has to be what was chosen, less what was cut."""
    assert engine.budget is not None
    observe = engine.budget.observe

    def watched(choice: DraftChoice, outcomes: Outcomes, run: StepRun) -> None:
        num_drafts, paths = outcomes
        assert len(num_drafts) == len(paths) == len(choice.caps)
        assert (paths <= num_drafts[:, None]).all()
        is_node = paths > 0
        assert (np.diff(is_node.astype(int), axis=1) <= 0).all()
        steps = np.diff(paths, axis=1)[is_node[:, 1:]]
        if choice.mean_drafts is None:
            assert (num_drafts <= choice.caps).all()
            assert (steps > 0).all()
        else:  # one place for as many nodes as there are requests
            assert (steps >= 0).all()
        observe(choice, outcomes, run)

    engine.budget.observe = watched  # type: ignore[method-assign]


def check_setting(setting: Setting, count: int) -> None:
    rng = random.Random(setting.seed)
    turns = any_turns(rng, count)
    drafter = drafter_named(setting.name, naive.known(target(), [j for t in turns for j in t]))
    nodes = 10 if setting.name.endswith("tree") else None
    slack = max(Speculation(drafter, 4, num_draft_nodes=nodes).cache_slack, 14)
    engine = engines.make_engine(
        target(),
        drafter,
        4,
        eos=EOS,
        static=setting.static,
        nodes=nodes,
        auto=setting.is_auto,
        max_model_len=CONTEXT,
        max_num_seqs=4,
        block_size=setting.block_size,
        max_num_batched_tokens=setting.max_rows,
        enable_prefix_caching=setting.prefix_caching,
        **engines.room_for(CONTEXT + slack + setting.spare, target(), drafter),
    )
    poison(engine)
    if setting.is_auto:
        if setting.seed % 4:  # else its own choice
            any_choice(engine, setting.seed)
        watch_budget(engine)
    net = network(setting.name) if setting.name in HEADS else None
    conversations = Conversations(engine, turns, net)
    conversations.run(rng, abort_rate=0.06)
    conversations.check_answers()


@settings(max_examples=14, phases=[Phase.generate])  # shrinking takes minutes
@given(SETTINGS)
def test_answers_and_known_blocks_are_right_with_all_features(setting: Setting) -> None:
    check_setting(setting, 3)


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.generate])
@given(SETTINGS)
def test_answers_and_known_blocks_are_right_with_all_features_at_length(setting: Setting) -> None:
    check_setting(setting._replace(seed=setting.seed + 10_000), 6)


@both_forms
@pytest.mark.parametrize("name", ["chain", "corrected tree", "eagle3", "eagle3 tree"])
@pytest.mark.parametrize("choice", [(0, 0, 0), (1, 1, 1)], ids=["paused", "shallow"])
def test_blocks_that_were_written_with_fewer_drafts_serve_a_second_turn(
    choice: tuple[int, int, int], name: str, static: bool
) -> None:
    """The first answer is given by steps of this choice, the second with all drafts."""
    first = Job(list(range(1, 12)), SamplingParams(temperature=0.0, max_tokens=24), eos=EOS)
    (known,) = naive.known(target(), [first])
    second = Job([*known, 7, 8], first.params, eos=EOS)
    sequences = [*naive.known(target(), [second]), known]
    nodes = 10 if name.endswith("tree") else None
    engine = engines.make_engine(
        target(), drafter_named(name, sequences), 4, eos=EOS, static=static, nodes=nodes, auto=True
    )
    poison(engine)
    assert engine.budget is not None
    engine.budget.__class__ = Scripted
    assert isinstance(engine.budget, Scripted)
    engine.budget.script = [choice]
    requests = engines.run(engine, [first])
    engine.budget.script = [(nodes or 4, 4, nodes or 4)]
    requests += engines.run(engine, [second])
    naive.check(target(), requests, [first, second])
    assert requests[1].num_cached_tokens > len(first.prompt) + 10
    assert requests[1].stats.num_accepted_tokens > 0
    check_known_blocks(engine, sequences, network(name))


@pytest.mark.parametrize("rank", [0, 2])
def test_of_a_tree_that_is_cut_the_scores_of_what_is_left_are_learned(rank: int) -> None:
    """The grammar permits one token, which is always the candidate of this rank: those before it
    are cut and nothing is learned of them."""
    wanted = StructuredOutputsParams(regex="a{40}")
    jobs = jobs_of([greedy(wanted, 36)] * 2)
    drafter = drafters.ScriptedTrees(network("tree"), naive.known(target(), jobs), ranks=(rank,))
    engine = engines.make_engine(target(), drafter, 2, eos=EOS, nodes=40, auto=True)
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert sum(r.stats.num_accepted_tokens for r in requests) > 20
    assert engine.budget is not None
    calibration = engine.budget.calibration
    values = np.exp(-np.arange(9.0))  # what ScriptedTrees gives, best first
    (place,) = calibration._bins(np.log(values[rank : rank + 1] / values.sum()))
    assert calibration._drafts[:place].sum() == 0
    assert calibration._hits[place] > 10

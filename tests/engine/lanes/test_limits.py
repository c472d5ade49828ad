"""Where prompts and answers begin and end: chunk borders, last tokens, stops, the head's reach."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.steps import PREFILL_ITEM

from peagle.engine.request import Request
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import CONTEXT, GREEDY, Job
from .lane_tiny import (
    Script,
    ScriptedHead,
    check_naive,
    check_same,
    idle,
    known,
    lane_drafts,
    lane_engine,
    scripted_engine,
)

METHODS = ["p-eagle", "eagle3"]


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(method: str, **changes: Any) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), method, **changes))


def text(length: int, seed: int = 0) -> list[int]:
    return [(7 * n * n + 3 * n + seed) % tiny.VOCAB for n in range(length)]


def check_both(method: str, jobs: list[Job], k: int = 4, **options: Any) -> LaneEngine:
    script = Script(known(target(), jobs), seed=k)
    lanes = scripted_engine(target(), head(method), script, k, **options)
    plain = tiny.make_engine(target(), ScriptedHead(head(method), script), k)
    check_naive(target(), check_same(lanes, plain, jobs), jobs)
    return lanes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [1, 16, 40, 64])
def test_prompts_around_the_borders_of_items_and_chunks(method: str, budget: int) -> None:
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 50)
    params = dataclasses.replace(GREEDY, max_tokens=6)
    jobs = [Job(text(n, seed=n), params, joins=n % 4) for n in lengths]
    lanes = check_both(method, jobs, max_num_batched_tokens=budget)
    largest = max(shape.num_items for shape in lane_drafts(lanes).prefill_shapes)
    assert largest <= {1: 1, 16: 1, 40: 2, 64: 4}[budget]


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    engine = lane_engine(target(), max_num_batched_tokens=PREFILL_ITEM)
    first = engine.add_request("0", [1, 2, 3], GREEDY)
    while first.num_outputs == 0:
        engine.step()
    engine.add_request("1", text(80), GREEDY)
    for said in range(first.num_outputs, first.num_outputs + 4):
        assert first.num_outputs == said
        engine.step()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_answers_end_where_they_should(method: str, max_tokens: int) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    jobs = [Job(p, params, joins=n // 2) for n, p in enumerate(tiny.prompts(5))]
    check_both(method, jobs, k=5, max_num_seqs=2)


@pytest.mark.parametrize("method", METHODS)
def test_answers_end_with_the_context(method: str) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=None)
    jobs = [Job(text(CONTEXT - left, seed=left), params) for left in (1, 2, 3, 9)]
    lanes = check_both(method, jobs, k=7)
    assert lanes.stats.num_output_tokens == 15


@pytest.mark.parametrize("method", METHODS)
def test_a_shorter_context_than_the_models(method: str) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=None)
    jobs = [Job(text(n, seed=n), params) for n in (20, 27, 29)]
    lanes = lane_engine(target(), head(method), 5, max_model_len=30)
    plain = tiny.make_engine(target(), head(method), 5, max_model_len=30)
    requests = check_same(lanes, plain, jobs)
    assert tiny.answers_of(requests) == [tiny.naive(target(), j, max_model_len=30) for j in jobs]


@pytest.mark.parametrize("method", METHODS)
def test_a_head_with_fewer_positions_than_the_target(method: str) -> None:
    """It drafts as far as it can; behind that, requests go on without drafts."""
    short = head(method, max_position_embeddings=40)
    params = dataclasses.replace(GREEDY, max_tokens=22)
    jobs = [Job(text(n, seed=n), params) for n in (5, 25, 33, 39, 40, 41, 42, 60)]
    script = Script(known(target(), jobs))
    lanes = scripted_engine(target(), short, script, 6)
    plain = tiny.make_engine(target(), ScriptedHead(short, script), 6)
    requests = check_same(lanes, plain, jobs)
    check_naive(target(), requests, jobs)
    assert [r.stats.num_drafts > 0 for r in requests] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_token_in_the_middle_of_a_steps_tokens_ends_the_request(method: str) -> None:
    jobs = []
    for n, prompt in enumerate(tiny.prompts(5, seed=3)):
        said = tiny.naive(target(), Job(prompt, GREEDY))
        params = dataclasses.replace(GREEDY, stop_token_ids=(said[4 + n],))
        jobs.append(Job(prompt, params))
    lanes = check_both(method, jobs, k=7)
    assert lanes.stats.num_output_tokens < 5 * 20


def test_end_of_sequence_tokens_end_requests_unless_ignored() -> None:
    said = tiny.naive(target(), Job([1, 2, 3], GREEDY))
    eos = (said[6],)
    heeds, ignores = (dataclasses.replace(GREEDY, ignore_eos=flag) for flag in (False, True))
    jobs = [Job([1, 2, 3], params, eos=eos) for params in (heeds, ignores)]
    script = Script([[1, 2, 3, *said]])
    lanes = scripted_engine(target(), head("p-eagle"), script, 5, eos=eos)
    plain = tiny.make_engine(target(), ScriptedHead(head("p-eagle"), script), 5, eos=eos)
    check_naive(target(), check_same(lanes, plain, jobs), jobs)


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_stop_string_cuts_the_answer_while_steps_are_in_flight(at: int) -> None:
    """As answers.py does it: `stop_at` between two steps, with a number of tokens to keep."""
    jobs = [Job(p, GREEDY) for p in tiny.prompts(4, seed=6)]
    engine = scripted_engine(target(), head("p-eagle"), Script(known(target(), jobs)), 5)
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    stopped = requests[1]
    while engine.has_unfinished:
        engine.step()
        if stopped.finish_reason is None and stopped.num_outputs >= at:
            engine.stop_at(stopped, at)
    expected = [tiny.naive(target(), j) for j in jobs]
    expected[1] = expected[1][:at]
    assert tiny.answers_of(requests) == expected
    assert stopped.stats.num_output_tokens == at
    assert idle(engine)


def test_sampled_answers_do_not_depend_on_lane_or_neighbours() -> None:
    params = SamplingParams(seed=11, top_p=0.9, max_tokens=10)
    jobs = [Job(p, params, joins=n) for n, p in enumerate(tiny.prompts(5, seed=2))]
    together = tiny.run(lane_engine(target(), head("eagle3"), 3, max_num_seqs=2), jobs)
    alone: list[Request] = []
    for job in jobs:
        alone += tiny.run(lane_engine(target(), head("eagle3"), 3), [job._replace(joins=0)])
    assert tiny.answers_of(together) == tiny.answers_of(alone)

"""Requests whose callers go away, at any time: nothing is left behind, nobody else notices."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

LONG = [n % VOCAB for n in range(60)]


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def head(method: str) -> Drafter:
    return head_drafter(SHALLOW.make_head(target(), method))


@both_forms
@pytest.mark.parametrize("after", range(6))
def test_abort_before_during_and_after_prefill_leaves_nothing_behind(
    after: int, static: bool
) -> None:
    """The prompt takes four steps; later there are steps in flight."""
    engine = engines.make_engine(
        target(), head("p-eagle"), 3, max_num_batched_tokens=16, static=static
    )
    request = engine.add_request("0", LONG, GREEDY)
    for _ in range(after):
        engine.step()
    engine.abort_request(request)
    assert request.finish_reason == "abort"
    assert engines.is_idle(engine)
    output_ids = request.output_token_ids
    assert engine.step() == []  # what was in flight is nobody's
    assert request.output_token_ids == output_ids


@both_forms
def test_aborting_twice_or_late_does_no_harm(static: bool) -> None:
    engine = engines.make_engine(target(), max_num_seqs=1, static=static)
    running, waiting = (engine.add_request(str(n), [1, 2], GREEDY) for n in range(2))
    engine.step()
    for _ in range(2):
        engine.abort_request(waiting)
    while engine.has_unfinished:
        engine.step()
    engine.abort_request(running)
    assert running.finish_reason == "length"
    assert running.output_token_ids == naive.answer(target(), Job([1, 2], GREEDY))
    assert waiting.output_token_ids == []
    assert engines.is_idle(engine)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_freed_slot_serves_the_next_request_while_old_steps_are_in_flight(method: str) -> None:
    engine = engines.make_engine(target(), head(method), 4, max_num_seqs=1, static=True)
    first = engine.add_request("0", [5, 6, 7], GREEDY)
    for _ in range(2):
        engine.step()
    slot = engine.scheduler.slot_of(first)
    assert slot is not None
    assert engine.scheduler.batch.in_flight[slot.index] == 1
    engine.abort_request(first)
    second = engine.add_request("1", [8, 9], GREEDY)
    engine.step()
    new_slot = engine.scheduler.slot_of(second)
    assert new_slot is not None
    assert new_slot.index == slot.index
    while engine.has_unfinished:
        engine.step()
    assert second.output_token_ids == naive.answer(target(), Job([8, 9], GREEDY))


@both_forms
def test_nothing_is_unfinished_while_only_steps_of_aborted_requests_are_in_flight(
    static: bool,
) -> None:
    engine = engines.make_engine(target(), head("p-eagle"), 4, static=static)
    request = engine.add_request("0", [5, 6, 7], GREEDY)
    engine.step()
    engine.abort_request(request)
    assert not engine.has_unfinished
    (again,) = engines.run(engine, [Job([5, 6, 7], GREEDY)])
    assert again.output_token_ids == naive.answer(target(), Job([5, 6, 7], GREEDY))


@pytest.mark.slow
@both_forms
def test_a_crowd_that_comes_and_goes_does_not_disturb_the_others(static: bool) -> None:
    rng, texts = random.Random(0), prompts(5, seed=3)
    engine = engines.make_engine(target(), head("p-eagle"), 5, max_num_seqs=4, static=static)
    kept = [engine.add_request(f"kept {n}", p, GREEDY) for n, p in enumerate(texts)]
    doomed = []
    while engine.has_unfinished:
        if any(r.finish_reason is None for r in kept):
            doomed.append(engine.add_request("doomed", rng.choice(texts), GREEDY))
        engine.step()
        for request in doomed:
            if rng.random() < 0.5:
                engine.abort_request(request)
    naive.check(target(), kept, [Job(p, GREEDY) for p in texts])
    assert {r.finish_reason for r in doomed} <= {"abort", "length"}
    assert engines.is_idle(engine)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    aborts=st.dictionaries(st.integers(0, 4), st.integers(0, 9), max_size=5),
    seqs=st.integers(1, 4),
    method=st.sampled_from(["p-eagle", "eagle3"]),
    static=st.booleans(),
)
def test_what_an_aborted_request_has_said_is_a_beginning_of_its_answer(
    aborts: dict[int, int], seqs: int, method: str, static: bool
) -> None:
    """aborts: request -> the step before which it goes."""
    params = dataclasses.replace(GREEDY, max_tokens=7)
    jobs = [Job(p, params) for p in prompts(5, seed=1, longest=30)]
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": 16, "block_size": 2}
    engine = engines.make_engine(target(), head(method), 3, static=static, **options)
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    step = 0
    while engine.has_unfinished:
        for n, when in aborts.items():
            if when == step:
                engine.abort_request(requests[n])
        engine.step()
        step += 1
    for request, job in zip(requests, jobs, strict=True):
        expected = naive.answer(target(), job)
        assert request.output_token_ids == expected[: request.num_outputs]
        if request.finish_reason != "abort":
            assert request.num_outputs == len(expected)
    assert engines.is_idle(engine)


@both_forms
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_stop_string_cuts_the_answer_while_steps_are_in_flight(at: int, static: bool) -> None:
    """As answers.py does it: `stop_at` between two steps, with a number of tokens to keep."""
    jobs = [Job(p, GREEDY) for p in prompts(4, seed=6)]
    script = drafters.Script(naive.known(target(), jobs))
    drafter = drafters.ScriptedHead(SHALLOW.make_head(target()), script)
    engine = engines.make_engine(target(), drafter, 5, static=static)
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    stopped = requests[1]
    while engine.has_unfinished:
        engine.step()
        if stopped.finish_reason is None and stopped.num_outputs >= at:
            engine.stop_at(stopped, at)
    expected = [naive.answer(target(), j) for j in jobs]
    expected[1] = expected[1][:at]
    assert engines.answers_of(requests) == expected
    assert stopped.stats.num_output_tokens == at
    assert engine.stats.num_output_tokens == sum(map(len, expected))
    assert engines.is_idle(engine)

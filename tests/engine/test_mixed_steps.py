"""One step holds prompts and decode rows; requests that need the host take a step beside it."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest

from peagle.engine.runner import ROWS_PER_ITEM
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

SAMPLED = SamplingParams(seed=4, max_tokens=12, ignore_eos=True)
NEEDS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "minimum length": {"min_tokens": 6, "stop_token_ids": (3, 4, 5, 6, 7, 8)},
    "bias": {"logit_bias": {3: 4.0, 9: -4.0}},
}


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def network(method: str) -> EagleNetwork:
    return SHALLOW.make_head(target(), method)


def head(method: str) -> Drafter | None:
    return None if method == "none" else head_drafter(network(method))


def text(length: int, seed: int = 0) -> list[int]:
    return [(7 * n * n + 3 * n + seed) % VOCAB for n in range(length)]


@both_forms
@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
def test_decoding_goes_on_in_the_steps_of_a_long_prompt(method: str, static: bool) -> None:
    budget = ROWS_PER_ITEM
    options = {"max_num_batched_tokens": budget, "static": static}
    engine = engines.make_engine(target(), head(method), 3, **options)
    jobs = [Job([1, 2, 3], GREEDY), Job(text(60), GREEDY)]
    first = engine.add_request("0", jobs[0].prompt, GREEDY)
    while first.num_outputs < 2:
        engine.step()
    second, shapes = engine.add_request("1", jobs[1].prompt, GREEDY), engines.watched(engine).shapes
    shapes.clear()
    for _ in range(3):
        before = first.num_outputs
        engine.step()
        assert first.num_outputs > before
    assert second.num_outputs == 0
    assert len(shapes) == 3  # no step was the prompt's alone
    assert all(shape.batch == 1 and shape.num_items > 0 for shape in shapes)
    while engine.has_unfinished:
        engine.step()
    naive.check(target(), [first, second], jobs)


@pytest.mark.slow
@both_forms
def test_several_prompts_and_their_newest_tokens_share_a_step(static: bool) -> None:
    engine = engines.make_engine(target(), head("p-eagle"), 3, static=static)
    jobs = [Job(p, GREEDY) for p in prompts(5, seed=4, longest=30)]
    requests = [engine.add_request(str(n), j.prompt, GREEDY) for n, j in enumerate(jobs)]
    for _ in range(2 if static else 1):  # there it is read one step late
        engine.step()
    assert [r.num_outputs for r in requests] == [1] * 5
    while engine.has_unfinished:
        engine.step()
    naive.check(target(), requests, jobs)


def test_a_step_is_read_while_the_next_one_runs() -> None:
    static, exact = (engines.make_engine(target(), static=s) for s in (True, False))
    for engine in (static, exact):
        engine.add_request("0", [1, 2], GREEDY)
    assert static.step() == []
    assert [len(exact.step()) for _ in range(2)] == [1, 1]
    assert len(static.step()) == 1


def mixed_jobs(seed: int = 0) -> list[Job]:
    """One of each need, a bad word, and a request without needs after each."""
    texts = iter(prompts(12, seed=seed, longest=16))
    jobs = [Job(next(texts), GREEDY, bad_word_ids=[[5], [7, 8]])]
    for number, changes in enumerate(NEEDS.values()):
        base = SAMPLED if number % 2 else dataclasses.replace(GREEDY, max_tokens=12)
        jobs.append(Job(next(texts), dataclasses.replace(base, **changes), joins=number))
        jobs.append(Job(next(texts), base, joins=number))
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 13])
@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
def test_requests_that_need_the_host_are_served_beside_others(method: str, budget: int) -> None:
    jobs, logprobs = mixed_jobs(), []
    for static in (False, True):
        engine = engines.make_engine(
            target(), head(method), 3, max_num_batched_tokens=budget, static=static
        )
        requests = engines.run(engine, jobs)
        naive.check(target(), requests, jobs)
        logprobs.append([[x.token_ids for x in r.logprobs] for r in requests])
    assert logprobs[0] == logprobs[1]
    assert [len(x) for x in logprobs[0]] == [0, requests[1].num_outputs, *[0] * 7]


@both_forms
def test_only_those_that_must_take_the_hosts_step(static: bool) -> None:
    engine = engines.make_engine(target(), head("p-eagle"), 3, max_num_seqs=9, static=static)
    jobs = mixed_jobs()
    for n, job in enumerate(jobs):
        engine.add_request(str(n), job.prompt, job.params, bad_word_ids=job.bad_word_ids)
    engine.step()
    slots = engine.scheduler.running.values()
    needs = [s.request.request_id for s in slots if engine.scheduler.batch.needs_host[s.index]]
    assert needs == ["0", "1", "3", "5", "7"]
    sizes = [shape.batch for shape in engines.watched(engine).shapes]
    assert sizes == ([8, 4] if static else [5, 4])


@both_forms
def test_a_minimum_length_needs_the_host_until_it_is_reached(static: bool) -> None:
    params = dataclasses.replace(GREEDY, min_tokens=6, stop_token_ids=(99 % VOCAB,))
    job = Job([1, 2, 3], params)
    script = drafters.Script(naive.known(target(), [job]))
    drafter = drafters.ScriptedHead(network("p-eagle"), script)
    engine = engines.make_engine(target(), drafter, 3, static=static)
    request = engine.add_request("0", job.prompt, params)
    while engine.has_unfinished:
        engine.step()
        if request.finish_reason is None:
            assert engine.scheduler.batch.needs_host[0] == (request.num_outputs < 6)
    naive.check(target(), [request], [job])


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_by_rejection_a_request_says_the_same_with_logprobs_and_without(
    method: str, static: bool
) -> None:
    params = SamplingParams(seed=6, top_p=0.9, max_tokens=14)
    texts = prompts(4, seed=3)
    jobs = [Job(p, dataclasses.replace(params, logprobs=2)) for p in texts]
    jobs += [Job(p, params) for p in texts]
    engine = engines.make_engine(target(), head(method), 4, "rejection", static=static)
    answers = engines.answers_of(engines.run(engine, jobs))
    assert answers[:4] == answers[4:]


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, 6, 25])
@both_forms
def test_both_kinds_come_through_when_blocks_are_short(spare: int, static: bool) -> None:
    jobs, drafter = mixed_jobs(seed=2), head("eagle3")
    options = {"block_size": 1, "max_model_len": 40} | engines.room_for(
        40 + spare, target(), drafter
    )
    engine = engines.make_engine(target(), drafter, 3, static=static, **options)
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert sum(r.num_preemptions for r in requests) > 0


@both_forms
def test_a_report_is_read_at_most_one_step_late_while_others_need_the_host(static: bool) -> None:
    """What ends is not kept waiting until the steps beside it end, too."""
    engine = engines.make_engine(target(), static=static)
    short = engine.add_request("0", [1, 2], dataclasses.replace(GREEDY, max_tokens=3))
    long = engine.add_request("1", [3, 4], dataclasses.replace(GREEDY, logprobs=0))
    for _ in range(3 + static):
        engine.step()
    assert short.finish_reason == "length"
    assert long.num_outputs == 3 + static
    engine.abort_request(long)

"""Up to the end of the context, and where the head's positions end before the target's."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import CONTEXT, SHALLOW, VOCAB, head_drafter

METHODS = ["p-eagle", "eagle3"]
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(torch.float64)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * n * n + 3 * n + seed) % VOCAB for n in range(length)]


def scripted(method: str, jobs: list[Job]) -> drafters.ScriptedHead:
    script = drafters.Script(naive.known(target(), jobs))
    return drafters.ScriptedHead(SHALLOW.make_head(target(), method), script)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT - 2, CONTEXT - 11])
@pytest.mark.parametrize("method", ["plain", "oracle", "p-eagle", "eagle3"])
def test_requests_run_exactly_up_to_the_context(length: int, method: str, static: bool) -> None:
    job, other = Job(prompt_of(length), ENDLESS), Job([1], GREEDY)
    expected = naive.answer(target(), job)
    assert len(expected) == CONTEXT - length
    drafter = {
        "plain": lambda: None,
        "oracle": lambda: drafters.oracle([job.prompt + expected]),
        "p-eagle": lambda: scripted("p-eagle", [job, other]),
        "eagle3": lambda: scripted("eagle3", [job, other]),
    }[method]()
    for budget in (CONTEXT * 2, 10):
        engine = engines.make_engine(
            target(), drafter, 8, max_num_batched_tokens=budget, max_num_seqs=2, static=static
        )
        requests = engines.run(engine, [job, other])
        assert requests[0].output_token_ids == expected
        assert requests[0].finish_reason == "length"


@both_forms
def test_max_model_len_ends_requests_before_the_targets_context(static: bool) -> None:
    job = Job(prompt_of(5), ENDLESS)
    expected = naive.answer(target(), job, max_model_len=20)
    for k in (1, 4, 16):
        drafter = drafters.oracle([job.prompt + naive.answer(target(), job, max_model_len=40)])
        engine = engines.make_engine(target(), drafter, k, max_model_len=20, static=static)
        (request,) = engines.run(engine, [job])
        assert request.output_token_ids == expected
        assert request.num_tokens == 20
        assert request.finish_reason == "length"


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prompt_length", [1, 18, 20, 21, 22, 40])
def test_a_head_with_fewer_positions_than_the_context_stops_drafting_there(
    method: str, prompt_length: int, static: bool
) -> None:
    network = SHALLOW.make_head(target(), method, max_position_embeddings=20)
    job = Job(prompt_of(prompt_length), SamplingParams(temperature=0.0, max_tokens=30))
    for budget in (64, 5):
        engine = engines.make_engine(
            target(),
            head_drafter(network),
            6,
            max_num_batched_tokens=budget,
            max_num_seqs=1,
            static=static,
        )
        (request,) = engines.run(engine, [job])
        assert request.output_token_ids == naive.answer(target(), job)
        # Behind the first output, draft 1 needs the row of the prompt's last token.
        assert (request.stats.num_draft_tokens > 0) == (prompt_length <= 20)


@pytest.mark.parametrize("method", METHODS)
def test_the_head_drafts_up_to_its_very_last_position(method: str) -> None:
    network = SHALLOW.make_head(target(), method, max_position_embeddings=20)
    engine = engines.make_engine(target(), head_drafter(network), 4)
    engine.add_request("0", prompt_of(10), SamplingParams(temperature=0.0, max_tokens=25))
    state, last_rows = engine.runner.models.state, []
    while engine.has_unfinished:
        engine.step()
        num_tokens, num_drafts = int(state.num_computed[0]) + 1, int(state.num_drafts[0])
        assert num_drafts == max(min(4, 22 - num_tokens), 0)
        # The last draft is predicted by the row at num_tokens - 2 + num_drafts - 1, at most 19.
        last_rows.append(num_tokens + num_drafts - 3 if num_drafts else 0)
    assert max(last_rows) == 19


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [7, 16, 40, 64])
def test_prompts_around_the_borders_of_items_and_chunks_are_answered(
    method: str, budget: int, static: bool
) -> None:
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 50)
    params = dataclasses.replace(GREEDY, max_tokens=6)
    jobs = [Job(prompt_of(n, seed=n), params, joins=n % 4) for n in lengths]
    engine = engines.make_engine(
        target(), scripted(method, jobs), 4, max_num_batched_tokens=budget, static=static
    )
    naive.check(target(), engines.run(engine, jobs), jobs)


@both_forms
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_answers_end_where_they_should(method: str, max_tokens: int, static: bool) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    jobs = [Job(p, params, joins=n // 2) for n, p in enumerate(prompts(5))]
    engine = engines.make_engine(target(), scripted(method, jobs), 5, max_num_seqs=2, static=static)
    naive.check(target(), engines.run(engine, jobs), jobs)

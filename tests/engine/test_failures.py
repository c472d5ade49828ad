"""A failing request fails alone: its neighbours' tokens do not change."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.errors import ConfigError, RequestError
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from . import tiny
from .tiny import GREEDY, VOCAB, Job

POISON = 39  # a token whose embedding is NaN in `poisoned`
PROMPTS = [[t for t in p if t != POISON] or [1] for p in tiny.prompts(4, seed=5)]
SAMPLED = SamplingParams(seed=2, max_tokens=20, top_p=0.95, logit_bias={POISON: -100.0})


@cache
def poisoned() -> TargetModel:
    model = tiny.make_target(torch.float64)
    model.embed_tokens.weight[POISON] = torch.nan
    model.lm_head.weight[POISON] = -10 * model.lm_head.weight.mean(0)
    return model


def jobs() -> list[Job]:
    bias = {POISON: -100.0}  # never chosen, so that only prompts and drafts hold it
    greedy = dataclasses.replace(GREEDY, logit_bias=bias)
    return [Job(p, greedy if n % 2 else SAMPLED) for n, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("method", ["none", "ngram-like", "p-eagle"])
def test_nan_logits_fail_one_request_and_leave_its_neighbours_alone(
    verification: Any, method: str
) -> None:
    alone = [tiny.naive(poisoned(), job) for job in jobs()]
    known = [j.prompt + a for j, a in zip(jobs(), alone, strict=True)]
    drafter = {
        "none": lambda: None,
        "ngram-like": lambda: tiny.mixed(known),
        "p-eagle": lambda: tiny.head_drafter(tiny.make_head(poisoned(), draft_vocab_size=20)),
    }[method]()
    engine = tiny.make_engine(poisoned(), drafter, 3, verification, max_num_batched_tokens=12)
    sick = Job([1, POISON, 2], GREEDY, joins=1)
    requests = tiny.run(engine, [*jobs(), sick, Job([*PROMPTS[0], POISON], SAMPLED, joins=3)])
    answers = tiny.answers_of(requests)
    healthy = range(4) if verification == "coupled" or drafter is None else (1, 3)
    if not (verification == "rejection" and drafter is None):
        assert [answers[n] for n in healthy] == [alone[n] for n in healthy]
    assert [r.finish_reason for r in requests] == ["length"] * 4 + ["error"] * 2
    for request in requests[4:]:
        assert request.output_token_ids == []
        assert request.error is not None
        assert "NaN" in request.error


def test_a_draft_that_breaks_the_target_does_not_fail_the_request() -> None:
    """Plain decoding would never have run that token, so nothing may be seen of it."""
    alone = [tiny.naive(poisoned(), job) for job in jobs()]
    known = [j.prompt + a for j, a in zip(jobs(), alone, strict=True)]
    knows = tiny.oracle(known)
    drafter = tiny.ScriptedDrafter(
        lambda h, k: [*knows.script(h, k)[:2], POISON] if len(h) % 3 == 0 else knows.script(h, k)
    )
    engine = tiny.make_engine(poisoned(), drafter, 4)
    requests = tiny.run(engine, jobs())
    assert tiny.answers_of(requests) == alone
    assert [r.finish_reason for r in requests] == ["length"] * 4


def test_a_request_that_bans_every_token_fails_alone() -> None:
    model = tiny.make_target(torch.float64)
    everything = [[t] for t in range(VOCAB)]
    for params in (GREEDY, SamplingParams(seed=1, top_p=0.9, top_k=3, max_tokens=5)):
        banned = Job([1, 2], params, bad_word_ids=everything)
        fine = Job([3, 4], GREEDY)
        first, second = tiny.run(tiny.make_engine(model), [banned, fine])
        assert (first.finish_reason, first.output_token_ids) == ("error", [])
        assert "every token is banned" in str(first.error)
        assert second.output_token_ids == tiny.naive(model, fine)


def test_nan_in_the_middle_of_an_answer_keeps_what_was_said() -> None:
    model = poisoned()
    bias = {POISON: 100.0}
    job = Job([1, 2], dataclasses.replace(GREEDY, logit_bias=bias))
    for drafter in (None, tiny.random_drafts()):
        (request,) = tiny.run(tiny.make_engine(model, drafter), [job])
        assert request.output_token_ids == [POISON]
        assert request.finish_reason == "error"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([0] * 96, {}, "the prompt has 96 tokens, the context 96"),
        ([VOCAB], {}, "token id 40 is not in the vocabulary of 40"),
        ([-1], {}, "token id -1"),
        ([0], {"num_speculative_tokens": 65}, "use at most 64"),
    ],
)
def test_the_engine_refuses_what_it_cannot_serve(
    prompt: list[int], params: dict[str, Any], message: str
) -> None:
    engine = tiny.make_engine(tiny.make_target(), tiny.random_drafts())
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert not engine.has_unfinished


def test_more_drafts_than_the_head_was_trained_for_are_refused() -> None:
    model = tiny.make_target()
    drafter = tiny.head_drafter(
        tiny.make_head(model, max_speculative_tokens=3, num_speculative_tokens=2)
    )
    with pytest.raises(ConfigError, match="use at most 3"):
        Speculation(drafter, 4)
    engine = tiny.make_engine(model, drafter, 3)
    with pytest.raises(RequestError, match="use at most 3"):
        engine.add_request("bad", [1], SamplingParams(num_speculative_tokens=4))


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        Engine(tiny.make_target(), EngineConfig(kv_cache_memory_bytes=1 << 12))


def test_a_step_without_requests_does_nothing() -> None:
    engine = tiny.make_engine(tiny.make_target(), tiny.random_drafts())
    assert engine.step() == []
    assert engine.stats.num_steps == 0


def test_aborting_twice_or_late_does_no_harm() -> None:
    engine = tiny.make_engine(tiny.make_target(), tiny.random_drafts(), max_num_seqs=1)
    running, waiting = (engine.add_request(str(n), [1, 2], GREEDY) for n in range(2))
    engine.step()
    for _ in range(2):
        engine.abort(running)
        engine.abort(waiting)
    assert not engine.has_unfinished
    assert engine.allocator.num_free == engine.allocator.num_blocks
    (done,) = tiny.run(engine, [Job([1, 2], GREEDY)])
    engine.abort(done)
    assert done.finish_reason == "length"

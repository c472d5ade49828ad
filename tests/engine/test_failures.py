"""A failing request fails alone: its neighbours' tokens do not change."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.errors import ConfigError, RequestError
from peagle.kernels.device_batch import HEADER, make_device_batch
from peagle.kernels.reference.batch import begin_step, commit
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

POISON = 39  # a token whose embedding is NaN in `poisoned`
PROMPTS = [[t for t in p if t != POISON] or [1] for p in prompts(4, seed=5)]
SAMPLED = SamplingParams(seed=2, max_tokens=20, top_p=0.95, ignore_eos=True)


class Shy(TargetModel):
    """Never chooses POISON, so that only prompts and drafts hold it."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[..., POISON] = logits.amin(-1) - 100.0
        return logits


@cache
def poisoned() -> TargetModel:
    model = SHALLOW.make_target(torch.float64)
    model.embed_tokens.weight[POISON] = torch.nan
    model.__class__ = Shy
    return model


def head(model: TargetModel, method: str = "p-eagle", **changes: Any) -> EagleNetwork:
    return SHALLOW.make_head(model, method, **changes)


def jobs() -> list[Job]:
    """The last one's logits are changed on the host."""
    plain = [Job(p, SAMPLED if n % 2 else GREEDY) for n, p in enumerate(PROMPTS)]
    biased = dataclasses.replace(plain[-1].params, logit_bias={3: 1.5})
    return [*plain[:-1], Job(PROMPTS[-1], biased)]


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("method", ["none", "ngram-like", "p-eagle", "eagle3"])
def test_nan_logits_fail_one_request_and_leave_its_neighbours_alone(
    verification: Any, method: str, static: bool
) -> None:
    healthy = jobs()
    sick = [Job([1, POISON, 2], GREEDY, joins=1), Job([*PROMPTS[0], POISON], SAMPLED, joins=3)]

    def engine() -> Engine:
        drafter = {
            "none": lambda: None,
            "ngram-like": lambda: drafters.mixed(naive.known(poisoned(), healthy)),
            "p-eagle": lambda: head_drafter(head(poisoned(), draft_vocab_size=20)),
            "eagle3": lambda: head_drafter(head(poisoned(), "eagle3")),
        }[method]()
        return engines.make_engine(poisoned(), drafter, 3, verification, static=static)

    requests = engines.run(engine(), [*healthy, *sick])
    assert [r.finish_reason for r in requests] == ["length"] * len(healthy) + ["error"] * 2
    for request in requests[len(healthy) :]:
        assert request.output_token_ids == []
        assert request.error is not None
        assert "NaN" in request.error
    step = 2 if verification == "rejection" and method != "none" else 1  # the greedy ones, or all
    naive.check(poisoned(), requests[: len(healthy) : step], healthy[::step])
    if method != "ngram-like":  # whose drafts come from one stream for all
        alone = engines.answers_of(engines.run(engine(), healthy))
        assert engines.answers_of(requests[: len(healthy)]) == alone


class PoisonousScript(drafters.Script):
    """Drafts of a script, but now and then the third is POISON."""

    def drafts(self, prompt: Any, num_tokens: int, k: int) -> list[int]:
        tokens = super().drafts(prompt, num_tokens, k)
        return [*tokens[:2], POISON, *tokens[3:]][:k] if num_tokens % 3 == 0 else tokens


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_draft_that_breaks_the_target_does_not_fail_the_request(
    method: str, static: bool
) -> None:
    """Plain decoding would never have run that token, so nothing may be seen of it."""
    script = PoisonousScript(naive.known(poisoned(), jobs()))
    drafter = drafters.ScriptedHead(head(poisoned(), method), script)
    requests = engines.run(engines.make_engine(poisoned(), drafter, 4, static=static), jobs())
    naive.check(poisoned(), requests, jobs())
    assert [r.finish_reason for r in requests] == ["length"] * 4


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_drafter_of_nan_costs_acceptance_alone(
    method: str, verification: Any, static: bool
) -> None:
    model = SHALLOW.make_target(torch.float64)
    network = head(model, method)
    for weight in network.parameters():
        weight.fill_(torch.nan)
    drafter = head_drafter(network)
    requests = engines.run(
        engines.make_engine(model, drafter, 3, verification, static=static), jobs()
    )
    step = 1 if verification == "coupled" else 2  # all, or the greedy ones
    naive.check(model, requests[::step], jobs()[::step])
    assert [r.finish_reason for r in requests] == ["length"] * 4
    assert all(r.stats.num_drafts > 0 for r in requests)


def test_a_draft_is_never_kept_where_nothing_could_be_chosen() -> None:
    """Even if it is the token that stands there, and the row behind it is sound."""
    state = make_device_batch(1, 4, 2, torch.device("cpu"), None)
    state.limits[0], state.capacity[0], state.num_computed[0] = 20, 20, 5
    state.num_drafts[0] = state.max_drafts[0] = state.max_depths[0] = 2
    slots, drafts = torch.tensor([0]), torch.tensor([[7, 8]])
    counts = begin_step(state, slots, torch.tensor([2]), 2)
    usable = torch.tensor([[True, False, True]])
    committed = commit(state, slots, counts, drafts, torch.tensor([[7, 8, 9]]), usable, 100, 2)
    assert committed.report[0, :HEADER].tolist() == [0, 2, 0]  # done again, without drafts
    assert state.max_drafts[0] == 0
    alone = begin_step(state, slots, torch.tensor([2]), 2)
    committed = commit(state, slots, alone, drafts, torch.tensor([[7, 8, 9]]), ~usable, 100, 2)
    assert committed.report[0, :HEADER].tolist() == [0, 0, 1]
    assert begin_step(state, slots, torch.tensor([2]), 2).num_rows.tolist() == [0]  # it has ended


@both_forms
def test_a_request_that_bans_every_token_fails_alone(static: bool) -> None:
    model = SHALLOW.make_target(torch.float64)
    everything = [[t] for t in range(VOCAB)]
    for params in (GREEDY, SamplingParams(seed=1, top_p=0.9, top_k=3, max_tokens=5)):
        banned = Job([1, 2], params, bad_word_ids=everything)
        fine = Job([3, 4], GREEDY)
        first, second = engines.run(engines.make_engine(model, static=static), [banned, fine])
        assert (first.finish_reason, first.output_token_ids) == ("error", [])
        assert "every token is banned" in str(first.error)
        assert second.output_token_ids == naive.answer(model, fine)


@cache
def fails_after(num_outputs: int) -> tuple[TargetModel, list[int]]:
    """A target that is NaN once it has read its own output number `num_outputs`."""
    model, output = SHALLOW.make_target(torch.float64), list[int]()
    while len(output) < num_outputs:
        output.append(int(naive.logits_of(model, [1, 2, *output])[-1].argmax()))
    model.embed_tokens.weight[output[-1]] = torch.nan
    return model, output


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
@pytest.mark.parametrize("num_outputs", [1, 4, 6])
def test_nan_in_the_middle_of_an_answer_keeps_what_was_said(
    method: str, num_outputs: int, static: bool
) -> None:
    model, output = fails_after(num_outputs)
    first = output.index(output[-1]) + 1  # that token may have been said before
    job, well = Job([1, 2], GREEDY), Job([3, 4], GREEDY)
    fine = SHALLOW.make_target(torch.float64)
    script = drafters.Script([[1, 2, *output], [3, 4, *naive.answer(fine, well)]], seed=1)
    drafter = None if method == "none" else drafters.ScriptedHead(head(model, method), script)
    sick, _ = engines.run(engines.make_engine(model, drafter, 4, static=static), [job, well])
    assert sick.output_token_ids == output[:first]
    assert sick.finish_reason == "error"
    assert f"at output {first}" in str(sick.error)


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
    engine = engines.make_engine(SHALLOW.make_target(), drafters.random_drafts())
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", prompt, SamplingParams(**params))
    assert not engine.has_unfinished


def test_more_drafts_than_the_head_was_trained_for_are_refused() -> None:
    model = SHALLOW.make_target()
    drafter = head_drafter(
        SHALLOW.make_head(model, max_speculative_tokens=3, num_speculative_tokens=2)
    )
    with pytest.raises(ConfigError, match="use at most 3"):
        Speculation(drafter, 4)
    engine = engines.make_engine(model, drafter, 3)
    with pytest.raises(RequestError, match="use at most 3"):
        engine.add_request("bad", [1], SamplingParams(num_speculative_tokens=4))


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        Engine(SHALLOW.make_target(), EngineConfig(kv_cache_memory_bytes=1 << 12))


@both_forms
def test_a_step_without_requests_does_nothing(static: bool) -> None:
    engine = engines.make_engine(SHALLOW.make_target(), drafters.random_drafts(), static=static)
    assert engine.step() == []
    assert engine.stats.num_steps == 0

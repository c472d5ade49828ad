"""NaN in a lane: the request fails as in the plain engine, its neighbours never notice."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import (
    Script,
    ScriptedHead,
    check_naive,
    endings,
    idle,
    lane_engine,
    scripted_engine,
)

POISON = 39  # a token whose embedding is NaN in `poisoned`
SAMPLED = SamplingParams(seed=2, max_tokens=20, top_p=0.95, ignore_eos=True)
PROMPTS = [[t for t in p if t != POISON] or [1] for p in tiny.prompts(4, seed=5)]


class Shy(TargetModel):
    """Never chooses POISON, so that only prompts and drafts hold it."""

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        logits[..., POISON] = logits.amin(-1) - 100.0
        return logits


@cache
def poisoned() -> TargetModel:
    model = tiny.make_target(torch.float64)
    model.embed_tokens.weight[POISON] = torch.nan
    model.__class__ = Shy
    return model


def head(model: TargetModel, method: str = "p-eagle", **changes: Any) -> Drafter:
    return tiny.head_drafter(tiny.make_head(model, method, **changes))


def jobs() -> list[Job]:
    return [Job(p, SAMPLED if n % 2 else GREEDY) for n, p in enumerate(PROMPTS)]


@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
def test_nan_logits_fail_one_request_and_leave_its_neighbours_alone(method: str) -> None:
    healthy = jobs()
    sick = [Job([1, POISON, 2], GREEDY, joins=1), Job([*PROMPTS[0], POISON], SAMPLED, joins=3)]
    drafter = None if method == "none" else head(poisoned(), method, draft_vocab_size=20)
    lanes = lane_engine(poisoned(), drafter, 3, max_num_batched_tokens=16)
    plain = tiny.make_engine(poisoned(), drafter, 3)
    ours, theirs = tiny.run(lanes, [*healthy, *sick]), tiny.run(plain, [*healthy, *sick])
    assert endings(ours) == endings(theirs)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    check_naive(poisoned(), ours[: len(healthy)], healthy)
    assert [r.finish_reason for r in ours[len(healthy) :]] == ["error"] * 2
    assert idle(lanes)


@cache
def fails_after(num_outputs: int) -> tuple[TargetModel, list[int]]:
    """A target that is NaN once it has read its own token number `num_outputs` of an answer."""
    model, said = tiny.make_target(torch.float64), list[int]()
    while len(said) < num_outputs:
        said.append(int(tiny.naive_logits(model, [1, 2, *said])[-1].argmax()))
    model.embed_tokens.weight[said[-1]] = torch.nan
    return model, said


@pytest.mark.parametrize("method", ["none", "p-eagle", "eagle3"])
@pytest.mark.parametrize("num_outputs", [1, 4, 6])
def test_nan_in_the_middle_of_an_answer_keeps_what_was_said(method: str, num_outputs: int) -> None:
    model, said = fails_after(num_outputs)
    first = said.index(said[-1]) + 1  # that token may have been said before
    job, well = Job([1, 2], GREEDY), Job([3, 4], GREEDY)
    fine = tiny.make_target(torch.float64)
    script = Script([[1, 2, *said], [3, 4, *tiny.naive(fine, well)]], seed=1)
    if method == "none":
        lanes, plain = lane_engine(model), tiny.make_engine(model)
    else:
        lanes = scripted_engine(model, head(model, method), script, 4)
        plain = tiny.make_engine(model, ScriptedHead(head(model, method), script), 4)
    ours, theirs = tiny.run(lanes, [job, well]), tiny.run(plain, [job, well])
    assert ours[0].output_token_ids == said[:first]
    assert f"at output {first}" in str(ours[0].error)
    assert endings(ours) == endings(theirs)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    assert idle(lanes)


class PoisonousScript(Script):
    """Right drafts, but now and then the third is POISON."""

    def drafts(self, prompt: Any, num_tokens: int, k: int) -> list[int]:
        tokens = super().drafts(prompt, num_tokens, k)
        return [*tokens[:2], POISON, *tokens[3:]][:k] if num_tokens % 3 == 0 else tokens


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_draft_that_breaks_the_target_does_not_fail_the_request(method: str) -> None:
    """Plain decoding would never have run that token, so nothing may be seen of it."""
    healthy = jobs()
    script = PoisonousScript([j.prompt + tiny.naive(poisoned(), j) for j in healthy])
    lanes = scripted_engine(poisoned(), head(poisoned(), method), script, 4)
    requests = tiny.run(lanes, healthy)
    assert [r.finish_reason for r in requests] == ["length"] * len(healthy)
    check_naive(poisoned(), requests, healthy)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_drafter_of_nan_costs_acceptance_alone(method: str) -> None:
    model = tiny.make_target(torch.float64)
    network = tiny.make_head(model, method)
    for weight in network.parameters():
        weight.fill_(torch.nan)
    requests = tiny.run(lane_engine(model, tiny.head_drafter(network), 3), jobs())
    check_naive(model, requests, jobs())
    assert all(r.stats.num_drafts > 0 for r in requests)

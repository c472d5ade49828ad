"""Greedy steps of many rows choose without logits, and choose the same."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from peagle.engine.lanes.engine import LaneEngine
from torch import Tensor

from peagle.kernels import policy
from peagle.kernels.plain import best_token
from peagle.kernels.plain.choose import Chosen
from peagle.kernels.policy import BATCH_INVARIANT, FAST, Policy
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import Job
from .lane_tiny import WatchedSteps, check_naive, check_same, endings, lane_engine
from .test_equals_plain import HEADS, MODES, head, jobs_of, target

SHORT = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def _any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chooses = Policy.chooses_without_logits
    none = dataclasses.replace(FAST, max_logit_rows=0)
    monkeypatch.setattr(Policy, "chooses_without_logits", lambda _, hidden: chooses(none, hidden))


@pytest.fixture(autouse=True)
def _exact_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models are float64, where two orders of a sum cannot choose two tokens."""
    monkeypatch.setattr(policy, "HALF", (*policy.HALF, torch.float64))


def watch(engine: LaneEngine) -> list[int]:
    """The numbers of rows that are chosen without logits, as the engine runs."""
    counts: list[int] = []

    def best_tokens(hidden: Tensor, weight: Tensor, ids: Tensor | None) -> Chosen:
        counts.append(hidden.shape[0])
        return best_token.best_tokens(hidden, weight, ids)

    ops = engine.models.ops._replace(best_tokens=best_tokens)
    engine.models = dataclasses.replace(engine.models, ops=ops)
    engine.steps = engine._prompts.steps = WatchedSteps(engine)
    return counts


@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("name", HEADS)
def test_every_choice_of_a_greedy_run_is_the_plain_engines(name: str) -> None:
    lanes, plain = lane_engine(target(), head(name), 4), tiny.make_engine(target(), head(name), 4)
    counts, jobs = watch(lanes), jobs_of("greedy")
    check_naive(target(), check_same(lanes, plain, jobs), jobs)
    prefills, decodes = lanes.steps.prefill_shapes, lanes.steps.decode_shapes
    drafts = 4 if HEADS[name].get("method") == "eagle3" else 1
    assert len(counts) == len(prefills) + (drafts + 1) * len(decodes)


@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("mode", [m for m in MODES if m != "greedy"])
def test_steps_that_sample_keep_their_logits(mode: str) -> None:
    lanes = lane_engine(target(), head("p-eagle"), 3)
    counts, jobs = watch(lanes), [job._replace(joins=0) for job in jobs_of(mode)]
    check_naive(target(), tiny.run(lanes, jobs), jobs)
    steps = (*lanes.steps.prefill_shapes, *lanes.steps.decode_shapes)
    assert (counts == []) == all(step.sampling != "greedy" for step in steps)
    assert sum(step.sampling != "greedy" for step in steps) > 3


def test_thirty_two_rows_have_logits_and_more_have_none() -> None:
    """5 to 8 requests at K = 4: 32 rows of drafts, 40 of verification."""
    jobs = [Job(prompt, SHORT) for prompt in tiny.prompts(7)]
    lanes = lane_engine(target(), head("p-eagle"), 4, max_num_seqs=8)
    counts = watch(lanes)
    check_naive(target(), tiny.run(lanes, jobs), jobs)
    assert set(counts) == {40}


@cache
def broken() -> TargetModel:
    model = tiny.make_target(torch.float64)
    model.embed_tokens.weight[39] = torch.nan
    return model


@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_nan_fails_its_own_request_alone(method: str) -> None:
    drafter = tiny.head_drafter(tiny.make_head(broken(), method, draft_vocab_size=20))
    jobs = [Job([1, 2], SHORT), Job([1, 39], SHORT), Job([5, 6, 7], SHORT)]
    lanes, plain = lane_engine(broken(), drafter, 3), tiny.make_engine(broken(), drafter, 3)
    counts, ours, theirs = watch(lanes), tiny.run(lanes, jobs), tiny.run(plain, jobs)
    assert endings(ours) == endings(theirs)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    assert ours[1].finish_reason == "error"
    assert counts


def test_only_half_precision_rows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dtype in (torch.bfloat16, torch.float16):
        assert FAST.chooses_without_logits(torch.empty(33, 8, dtype=dtype))
        assert not FAST.chooses_without_logits(torch.empty(32, 8, dtype=dtype))
        assert BATCH_INVARIANT.chooses_without_logits(torch.empty(1, 8, dtype=dtype))
    for dtype in (torch.float32, torch.float64):
        assert not FAST.chooses_without_logits(torch.empty(33, 8, dtype=dtype))
        assert not BATCH_INVARIANT.chooses_without_logits(torch.empty(33, 8, dtype=dtype))

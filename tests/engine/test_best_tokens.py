"""Greedy steps of many rows choose without logits, and choose the same."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from torch import Tensor

from peagle.engine.engine import Engine
from peagle.kernels import policy
from peagle.kernels.policy import BATCH_INVARIANT, FAST, Policy
from peagle.kernels.reference import best_token
from peagle.kernels.reference.sampling import SampledTokens
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

from .test_forms_agree import HEADS, MODES, head, jobs_of, target

SHORT = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def _any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    chooses = Policy.greedy_without_logits
    none = dataclasses.replace(FAST, max_logit_rows=0)
    monkeypatch.setattr(Policy, "greedy_without_logits", lambda _, hidden: chooses(none, hidden))


@pytest.fixture(autouse=True)
def _exact_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models are float64, where two orders of a sum cannot choose two tokens."""
    monkeypatch.setattr(policy, "HALF", (*policy.HALF, torch.float64))


def watch(engine: Engine) -> list[int]:
    """The numbers of rows that are chosen without logits, as the engine runs."""
    counts: list[int] = []

    def best_tokens(hidden: Tensor, weight: Tensor, ids: Tensor | None) -> SampledTokens:
        counts.append(hidden.shape[0])
        return best_token.best_tokens(hidden, weight, ids)

    models = engine.runner.models
    ops = models.ops._replace(best_tokens=best_tokens)
    engine.runner.models = dataclasses.replace(models, ops=ops)
    return counts


@pytest.mark.slow
@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("name", HEADS)
def test_every_choice_of_a_greedy_run_is_plain_decodings(name: str) -> None:
    engine = engines.make_engine(target(), head(name), 4, static=True)
    counts, jobs = watch(engine), jobs_of("greedy")
    naive.check(target(), engines.run(engine, jobs), jobs)
    drafts = 4 if HEADS[name].get("method") == "eagle3" else 1
    assert len(counts) == (drafts + 1) * len(engines.watched(engine).shapes)


@pytest.mark.slow
@both_forms
@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("mode", [m for m in MODES if m != "greedy"])
def test_steps_that_sample_keep_their_logits(mode: str, static: bool) -> None:
    engine = engines.make_engine(target(), head("p-eagle"), 3, static=static)
    counts, jobs = watch(engine), [job._replace(joins=0) for job in jobs_of(mode)]
    naive.check(target(), engines.run(engine, jobs), jobs)
    shapes = engines.watched(engine).shapes
    assert (counts == []) == all(shape.sampling != "greedy" for shape in shapes)
    assert sum(shape.sampling != "greedy" for shape in shapes) > 3


@pytest.mark.usefixtures("_any_number_of_rows")
def test_rows_whose_logits_the_host_changes_have_some() -> None:
    engine = engines.make_engine(target(), None)
    jobs = [Job([1, 2], dataclasses.replace(SHORT, logit_bias={3: 9.0}))]
    counts = watch(engine)
    naive.check(target(), engines.run(engine, jobs), jobs)
    assert counts == []


def test_thirty_two_rows_have_logits_and_more_have_none() -> None:
    """5 to 8 requests at K = 4: 32 rows of drafts, 40 of verification."""
    jobs = [Job(prompt, SHORT) for prompt in prompts(7)]
    engine = engines.make_engine(target(), head("p-eagle"), 4, static=True)
    counts = watch(engine)
    naive.check(target(), engines.run(engine, jobs), jobs)
    assert set(counts) == {40}


@cache
def broken() -> TargetModel:
    model = SHALLOW.make_target(torch.float64)
    model.embed_tokens.weight[39] = torch.nan
    return model


@both_forms
@pytest.mark.usefixtures("_any_number_of_rows")
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_nan_fails_its_own_request_alone(method: str, static: bool) -> None:
    drafter = head_drafter(SHALLOW.make_head(broken(), method, draft_vocab_size=20))
    jobs = [Job([1, 2], SHORT), Job([1, 39], SHORT), Job([3, 4], SHORT)]
    engine = engines.make_engine(broken(), drafter, 3, static=static)
    counts, requests = watch(engine), engines.run(engine, jobs)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    naive.check(broken(), requests[::2], jobs[::2])
    assert counts


def test_only_half_precision_rows_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dtype in (torch.bfloat16, torch.float16):
        assert FAST.greedy_without_logits(torch.empty(33, 8, dtype=dtype))
        assert not FAST.greedy_without_logits(torch.empty(32, 8, dtype=dtype))
        assert BATCH_INVARIANT.greedy_without_logits(torch.empty(1, 8, dtype=dtype))
    for dtype in (torch.float32, torch.float64):
        assert not FAST.greedy_without_logits(torch.empty(33, 8, dtype=dtype))
        assert not BATCH_INVARIANT.greedy_without_logits(torch.empty(33, 8, dtype=dtype))

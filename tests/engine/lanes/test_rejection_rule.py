"""The corners of rejection in a step: rounding, NaN, dummies, memory, the GPU's kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peagle.engine.lanes.choosing import ByRejection, StepRows
from peagle.kernels.lane_state import make_lane_state
from peagle.kernels.plain.lanes import HEADER, begin_step, commit
from train.live_memory import LiveBytes

from peagle.engine.memory import LOGIT_BYTES
from peagle.kernels.plain.rejection import Coins
from peagle.kernels.step_ops import StepOps, step_ops

from .. import tiny
from ..tiny import GREEDY, Job
from . import test_failures as failures
from .lane_tiny import (
    WatchedSteps,
    check_naive,
    check_same,
    counters,
    given,
    idle,
    lane_drafts,
    lane_engine,
)
from .test_equals_plain import MODES, jobs_of, target
from .test_failures import POISON, SAMPLED, poisoned
from .test_rejection import both


def test_a_refused_draft_that_is_drawn_again_is_no_accepted_one() -> None:
    """Where p equals q up to rounding, nothing is left of p - q, and p is drawn from."""
    vocab_size, depth = 8, 2
    state = make_lane_state(1, 4, depth + 1, 0, torch.zeros(1))
    state.limits[0], state.num_computed[0], state.num_prompt[0] = 20, 5, 3
    state.wanted_drafts[0], state.temperature[0] = depth, 1.0
    lanes = torch.tensor([0])
    counts = begin_step(state, lanes, depth, 100)
    logits = torch.full((depth + 1, vocab_size), -20.0)
    logits[:, 0] = 20.0  # token 0: also what stands behind the bonus token
    ones = torch.ones(1, depth + 1, dtype=torch.float64)
    refusing = Coins(ones[:, :-1], 0.5 * ones)  # 1 is no coin, but refuses where p = q
    ops = _ops()._replace(rejection_coins=lambda *_: refusing)
    rows = StepRows(state, lanes, counts.num_outputs, "sampled")
    choice = ByRejection(ops, rows, counts.num_drafts, depth, vocab_size)
    drafts = choice.draft(given(logits[:depth]), 0)
    judged = choice.judge(given(logits), drafts)
    assert drafts.tolist() == [[0, 0]]
    assert judged.chosen.tolist() == [[0, 0, 0]]
    report = commit(state, lanes, counts, *judged, None)
    assert report[0, :HEADER].tolist() == [1, depth, 0]  # one token, no draft accepted


def test_laws_stay_within_what_the_reserve_counts() -> None:
    """Counted against the tensors that a step's choices make, drafts and verification."""
    batch, depth, vocab_size = 8, 7, 4096
    rows, made = batch * (depth + 1), LiveBytes()
    state = make_lane_state(batch, 4, depth + 1, 0, torch.zeros(1))
    state.temperature.fill_(1.0)
    lanes = torch.arange(batch)
    choosing = StepRows(state, lanes, torch.ones_like(lanes), "sampled")
    with made:
        choice = ByRejection(_ops(), choosing, torch.full_like(lanes, depth), depth, vocab_size)
        drafts = choice.draft(given(torch.randn(batch * depth, vocab_size)), 0)
        choice.judge(given(torch.randn(rows, vocab_size)), drafts)
    assert made.peak <= rows * vocab_size * LOGIT_BYTES <= 4 * made.peak


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_drafter_of_nan_costs_acceptance_alone(method: str) -> None:
    network = tiny.make_head(target(), method)
    for weight in network.parameters():
        weight.fill_(torch.nan)
    jobs = jobs_of("mixed")
    requests = tiny.run(lane_engine(target(), tiny.head_drafter(network), 3, "rejection"), jobs)
    assert [r.finish_reason for r in requests] == ["length"] * len(jobs)
    check_naive(target(), requests[:1], jobs[:1])
    assert all(r.stats.num_drafts > 0 for r in requests)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_nan_logits_fail_one_request_and_leave_its_neighbours_alone(method: str) -> None:
    """Drafts may hold the token that breaks the target: they are refused, and nothing is seen."""
    healthy = failures.jobs()
    sick = [Job([1, POISON, 2], GREEDY, joins=1), Job([5, POISON], SAMPLED, joins=3)]
    drafter = failures.head(poisoned(), method)
    lanes = lane_engine(poisoned(), drafter, 3, "rejection", max_num_batched_tokens=16)
    requests = tiny.run(lanes, [*healthy, *sick])
    assert [r.finish_reason for r in requests] == ["length"] * len(healthy) + ["error"] * 2
    check_naive(poisoned(), requests[: len(healthy) : 2], healthy[::2])  # the greedy ones
    alone = lane_engine(poisoned(), drafter, 3, "rejection")
    assert tiny.answers_of(tiny.run(alone, healthy)) == tiny.answers_of(requests[: len(healthy)])
    assert idle(lanes)


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_what_the_dummy_lane_holds_changes_nothing(name: str) -> None:
    jobs = jobs_of("mixed", count=3)  # in batches of 4
    engines = [both(name, 3)[0] for _ in range(2)]
    state = engines[1].models.state
    state.pending_taps[state.dummy] = torch.nan
    state.pending_tokens[state.dummy] = 7
    state.last_tokens[state.dummy] = 5
    ours, theirs = (tiny.run(engine, jobs) for engine in engines)
    assert max(shape.batch for shape in lane_drafts(engines[0]).decode_shapes) == 4
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    assert counters(ours) == counters(theirs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels then want the GPU's tensors")
@pytest.mark.parametrize("name", ["p-eagle, reduced vocabulary", "eagle3"])
def test_the_gpus_kernels_choose_the_same_in_a_step(name: str) -> None:
    """In Triton's interpreter; tests/engine/gpu has the whole step, captured."""
    params = [
        dataclasses.replace(p, max_tokens=3) for p in (MODES["mixed"][0], MODES["sampled"][0])
    ]
    jobs = [Job(text, p) for text, p in zip(tiny.prompts(2), params, strict=True)]
    lanes, plain = both(name, 2)
    ops = lanes.models.ops._replace(**_chosen_by_kernels())
    lanes.models = dataclasses.replace(lanes.models, ops=ops)
    lanes.steps = WatchedSteps(lanes)
    check_same(lanes, plain, jobs)


def _ops() -> StepOps:
    return step_ops(torch.device("cpu"))


def _chosen_by_kernels() -> dict[str, Any]:
    from peagle.kernels.gpu import choose, rejection

    names = ("choose_tokens", "choose_with_laws", "token_laws")
    chosen = {name: getattr(choose, name) for name in names}
    return chosen | {n: getattr(rejection, n) for n in ("rejection_coins", "verify_rejection")}

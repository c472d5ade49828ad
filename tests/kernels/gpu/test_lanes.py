"""The Triton bookkeeping equals its plain twin to the bit, dummy entries included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.plain import lanes as plain

from . import lane_cases
from .lane_cases import DEVICE, EXAMPLES, Case, cases

gpu = pytest.importorskip("peagle.kernels.gpu.lanes")


def check_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_begin_step_equals_its_plain_twin(case: Case) -> None:
    arguments = (case.state, case.lanes, case.depth, case.max_draft_tokens)
    check_equal(gpu.begin_step(*arguments), plain.begin_step(*arguments))


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases(), st.integers(1, 17), st.integers(3, 60))
def test_plan_rows_equals_its_plain_twin(case: Case, rows: int, last: int) -> None:
    starts = case.state.num_computed[case.lanes]
    counts = torch.arange(len(case.lanes), device=DEVICE).remainder(rows + 1)
    arguments = (
        case.state.block_tables, case.lanes, starts, counts, rows,
        lane_cases.BLOCK_SIZE, lane_cases.TRASH, last,
    )  # fmt: skip
    check_equal(gpu.plan_rows(*arguments), plain.plan_rows(*arguments))


@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(cases())
def test_commit_equals_its_plain_twin(case: Case) -> None:
    counts = plain.begin_step(case.state, case.lanes, case.depth, case.max_draft_tokens)
    ours, theirs = lane_cases.copied(case.state), lane_cases.copied(case.state)
    arguments = (case.lanes, counts, case.drafts, case.chosen, case.usable, case.taps)
    assert torch.equal(gpu.commit(ours, *arguments), plain.commit(theirs, *arguments))
    lane_cases.check_states(ours, theirs)


def test_commit_keeps_taps_wider_than_one_tile() -> None:
    state = plain_state(width=1500)
    lanes = torch.tensor([1, 0], device=DEVICE)
    counts = plain.begin_step(state, lanes, 1, 100)
    taps = torch.randn(2, 2, 1500, device=DEVICE)
    tokens = torch.ones(2, 2, dtype=torch.int64, device=DEVICE)
    ours, theirs = lane_cases.copied(state), lane_cases.copied(state)
    arguments = (lanes, counts, tokens[:, :1], tokens, tokens.bool(), taps)
    assert torch.equal(gpu.commit(ours, *arguments), plain.commit(theirs, *arguments))
    lane_cases.check_states(ours, theirs)


def plain_state(width: int) -> lane_cases.LaneState:
    state = lane_cases.make_lane_state(2, 4, 2, width, torch.zeros((), device=DEVICE))
    state.limits[:2], state.num_computed[:2], state.num_prompt[:2] = 9, 4, 3
    state.wanted_drafts[:2], state.draft_starts[:2] = 1, 3
    return state

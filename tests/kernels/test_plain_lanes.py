"""The lanes' bookkeeping in plain torch equals slow loops over lanes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.plain import lanes, row_copies

from .gpu import lane_cases
from .gpu.lane_cases import Case, cases


def check_equal(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@settings(deadline=None)
@given(cases())
def test_begin_step_counts_rows_as_its_definition(case: Case) -> None:
    counts = lanes.begin_step(case.state, case.lanes, case.depth, case.max_draft_tokens)
    check_equal(counts, lane_cases.slow_begin_step(case))


@settings(deadline=None)
@given(cases())
def test_a_lane_never_verifies_beyond_its_end_and_the_dummy_never_at_all(case: Case) -> None:
    counts = lanes.begin_step(case.state, case.lanes, case.depth, case.max_draft_tokens)
    ends = counts.num_computed + counts.num_verify_rows
    running = counts.num_verify_rows > 0
    assert bool((ends[running] < case.state.limits[case.lanes][running]).all())
    assert not bool(running[case.lanes == case.state.dummy].any())
    assert not bool(counts.num_draft_rows[~running].any())


@settings(deadline=None)
@given(cases(), st.integers(1, 9), st.integers(3, 60))
def test_plan_rows_places_rows_as_its_definition(case: Case, rows: int, last: int) -> None:
    starts = case.state.num_computed[case.lanes].clamp(max=17)
    counts = torch.arange(len(case.lanes)).remainder(rows + 1)
    plan = lanes.plan_rows(
        case.state.block_tables, case.lanes, starts, counts, rows,
        lane_cases.BLOCK_SIZE, lane_cases.TRASH, last,
    )  # fmt: skip
    slow = lane_cases.slow_plan_rows(
        case.state.block_tables, case.lanes, starts, counts, rows, last
    )
    check_equal(plan, slow)


def test_rows_beyond_the_last_block_go_to_the_trash() -> None:
    """The column of a padding row may lie behind the table: it must not be looked up there."""
    tables = torch.tensor([[4, 5]], dtype=torch.int32)
    starts, counts = torch.tensor([5]), torch.tensor([1])
    plan = lanes.plan_rows(tables, torch.tensor([0]), starts, counts, 4, 3, 99, 6)
    assert plan.slots.tolist() == [5 * 3 + 2, 99, 99, 99]
    assert plan.positions.tolist() == [5, 6, 6, 6]
    assert plan.ends.tolist() == [6]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_expand_rows_puts_masks_behind_the_real_rows(
    batch: int, given_rows: int, num_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(batch, given_rows, 6, generator=generator)
    mask = torch.randn(6, generator=generator)
    most = min(given_rows, num_rows)
    num_real = torch.randint(most + 1, (batch,), generator=generator)
    rows = row_copies.expand_rows(real, num_real, mask, num_rows)
    assert torch.equal(rows, lane_cases.slow_expand_rows(real, num_real, mask, num_rows))


@settings(deadline=None)
@given(cases())
def test_commit_advances_lanes_as_its_definition(case: Case) -> None:
    counts = lanes.begin_step(case.state, case.lanes, case.depth, case.max_draft_tokens)
    expected, expected_report = lane_cases.slow_commit(case, counts)
    state = lane_cases.copied(case.state)
    report = lanes.commit(
        state, case.lanes, counts, case.drafts, case.chosen, case.usable, case.taps
    )
    assert torch.equal(report, expected_report)
    lane_cases.check_states(state, expected)

"""A step's bookkeeping in torch equals slow loops over slots."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.reference import batch, gather
from peagle.speculation.draft_limit import cache_slack, draft_limit, num_draft_rows

from ..gpu import batch_cases
from ..gpu.batch_cases import Case, cases, check_equal


@settings(deadline=None)
@given(cases())
def test_begin_step_counts_rows_as_its_definition(case: Case) -> None:
    counts = batch.begin_step(case.state, case.slots, case.caps, case.depth)
    check_equal(counts, batch_cases.slow_begin_step(case))


@settings(deadline=None)
@given(cases())
def test_a_step_verifies_within_blocks_and_caps_and_never_for_the_padding(case: Case) -> None:
    counts = batch.begin_step(case.state, case.slots, case.caps, case.depth)
    running = counts.num_rows > 0
    ends = counts.num_computed + counts.num_rows
    assert bool((ends <= case.state.capacity[case.slots])[running].all())
    assert bool((counts.num_drafts <= case.caps).all())
    assert not bool(running[case.slots == case.state.padding].any())


@settings(deadline=None)
@given(cases(), st.integers(1, 9), st.integers(3, 60))
def test_plan_rows_places_rows_as_its_definition(case: Case, rows: int, last: int) -> None:
    starts = case.state.num_computed[case.slots].clamp(max=17)
    counts = torch.arange(len(case.slots), device=starts.device).remainder(rows + 1)
    where = case.state.block_tables[0], case.slots, starts, counts, rows
    positions, slots = starts.new_empty(2, len(starts) * rows)
    plan = batch.plan_rows(
        *where, batch_cases.BLOCK_SIZE, batch_cases.PADDING_SLOT, last, positions, slots
    )
    check_equal(plan, batch_cases.slow_plan_rows(*where, last))
    assert plan.positions is positions
    assert plan.slots is slots


def test_rows_beyond_the_last_block_go_to_the_padding_slot() -> None:
    """The column of a padding row may lie behind the table: it must not be looked up there."""
    tables = torch.tensor([[4, 5]], dtype=torch.int32)
    starts, counts = torch.tensor([5]), torch.tensor([1])
    written = torch.empty(2, 4, dtype=torch.int64)
    plan = batch.plan_rows(tables, torch.tensor([0]), starts, counts, 4, 3, 99, 6, *written)
    assert plan.slots.tolist() == [5 * 3 + 2, 99, 99, 99]
    assert plan.positions.tolist() == [5, 6, 6, 6]
    assert plan.ends.tolist() == [6]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 8), st.integers(0, 99))
def test_expand_rows_puts_masks_behind_the_real_rows(
    batch_size: int, given_rows: int, num_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(batch_size, given_rows, 6, generator=generator)
    mask = torch.randn(6, generator=generator)
    most = min(given_rows, num_rows)
    num_real = torch.randint(most + 1, (batch_size,), generator=generator)
    rows = gather.expand_rows(real, num_real, mask, num_rows)
    assert torch.equal(rows, batch_cases.slow_expand_rows(real, num_real, mask, num_rows))


@settings(deadline=None)
@given(cases())
def test_commit_advances_slots_as_its_definition(case: Case) -> None:
    counts = batch.begin_step(case.state, case.slots, case.caps, case.depth)
    expected, expected_report, num_drafts, reads = batch_cases.slow_commit(case, counts)
    state = batch_cases.copied(case.state)
    committed = batch.commit(
        state,
        case.slots,
        counts,
        case.drafts,
        case.sampled_token_ids,
        case.usable,
        case.max_draft_tokens,
        case.max_depth,
        case.rows_per_depth,
    )
    assert torch.equal(committed.report, expected_report)
    assert committed.num_drafts.tolist() == num_drafts
    assert torch.equal(committed.num_outputs, counts.num_outputs + expected_report[:, 0])
    assert committed.num_real.tolist() == reads
    assert committed.num_rows.tolist() == [
        n + max(k - 1, 0) for n, k in zip(reads, num_drafts, strict=True)
    ]
    batch_cases.check_states(state, expected)


few = st.integers(0, 12)


@given(
    max_drafts=few,
    num_tokens=st.integers(1, 12),
    limit=few,
    capacity=st.integers(0, 40),
    reach=few,
    rows_per_depth=st.integers(1, 8),
)
def test_the_draft_limit_counts_drafts_that_have_a_place(
    max_drafts: int, num_tokens: int, limit: int, capacity: int, reach: int, rows_per_depth: int
) -> None:
    columns = (torch.tensor([n]) for n in (max_drafts, num_tokens, limit, capacity))
    numbers = max_drafts, num_tokens, limit, capacity, reach, rows_per_depth
    slow = batch_cases.slow_draft_limit(*numbers)
    assert draft_limit(*columns, reach, rows_per_depth).tolist() == [slow]


@given(st.integers(2, 8), st.integers(1, 30), st.integers(1, 8))
def test_rows_of_trees_never_need_more_than_the_slack_behind_an_answer(
    depth: int, num_nodes: int, rows_per_depth: int
) -> None:
    """At any position of a request that ends with 50 tokens."""
    limit, drafted, verified = 50, list[int](), list[int]()
    for num_tokens in range(1, limit):
        place = batch_cases.slow_draft_limit(depth, num_tokens, limit, 999, 999, rows_per_depth)
        if place:
            drafted.append(num_tokens - 1 + num_draft_rows(place, rows_per_depth))
            verified.append(num_tokens + num_nodes)
    most = limit + cache_slack(depth, num_nodes, rows_per_depth)
    assert max(verified) < most + 1
    assert max(drafted) <= most
    assert most in (max(drafted), max(verified) + 1)

"""The Triton bookkeeping equals its reference to the bit, padding included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.device_batch import StepCounts, make_device_batch
from peagle.kernels.reference import batch as reference
from peagle.speculation.draft_limit import draft_limit

from . import batch_cases
from .batch_cases import DEVICE, EXAMPLES, Case, cases, check_equal

gpu = pytest.importorskip("peagle.kernels.gpu.batch")


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_begin_step_equals_its_reference(case: Case) -> None:
    arguments = (case.state, case.slots, case.caps, case.depth)
    check_equal(gpu.begin_step(*arguments), reference.begin_step(*arguments))


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases(), st.integers(1, 17), st.integers(3, 60))
def test_plan_rows_equals_its_reference(case: Case, rows: int, last: int) -> None:
    starts = case.state.num_computed[case.slots]
    counts = torch.arange(len(case.slots), device=DEVICE).remainder(rows + 1)
    arguments = (
        case.state.block_tables[0], case.slots, starts, counts, rows,
        batch_cases.BLOCK_SIZE, batch_cases.PADDING_SLOT, last,
    )  # fmt: skip
    written = starts.new_empty(4, len(starts) * rows)
    tree_depths = torch.arange(len(starts) * rows, device=DEVICE).view(-1, rows) % 5
    depths = tree_depths if case.state.trees is not None else None
    first_row = 0 if depths is None else last % 9
    ours = gpu.plan_rows(*arguments, *written[:2], depths, first_row)
    check_equal(ours, reference.plan_rows(*arguments, *written[2:], depths, first_row))
    assert torch.equal(ours.positions, written[0])
    assert torch.equal(ours.slots, written[1])


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases(), st.integers(1, 17), st.data())
def test_shared_rows_are_planned_as_those_of_all(
    case: Case, rows: int, data: st.DataObject
) -> None:
    batch = len(case.slots)
    lengths = data.draw(st.lists(st.integers(1, rows), min_size=batch, max_size=batch))
    row_starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    starts, counts = case.state.num_computed[case.slots], torch.tensor(lengths, device=DEVICE)
    depths = torch.arange(batch * rows, device=DEVICE).view(-1, rows) % 5
    arguments = (
        case.state.block_tables[0], case.slots, starts, counts, rows,
        batch_cases.BLOCK_SIZE, batch_cases.PADDING_SLOT, 50,
    )  # fmt: skip
    everything = reference.plan_rows(*arguments, *starts.new_empty(2, batch * rows), depths)
    is_there = (torch.arange(rows, device=DEVICE) < counts[:, None]).flatten()
    for plan_rows in (gpu.plan_rows, reference.plan_rows):
        written = starts.new_empty(2, sum(lengths))
        plan = plan_rows(*arguments, *written, depths, 0, row_starts)
        check_equal(plan[:3], everything[:3])
        assert torch.equal(plan.positions, everything.positions[is_there])
        assert torch.equal(plan.slots, everything.slots[is_there])


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES, deadline=None)
@given(cases())
def test_commit_equals_its_reference(case: Case) -> None:
    counts = reference.begin_step(case.state, case.slots, case.caps, case.depth)
    ours, theirs = batch_cases.copied(case.state), batch_cases.copied(case.state)
    arguments = (
        case.slots, counts, case.drafts, case.sampled_token_ids, case.usable,
        case.max_draft_tokens, case.max_depth, case.rows_per_depth,
    )  # fmt: skip
    check_equal(gpu.commit(ours, *arguments), reference.commit(theirs, *arguments))
    batch_cases.check_states(ours, theirs)
    more = torch.arange(5 * len(case.slots), device=DEVICE).view(-1, 5)
    committed = gpu.commit(ours, *arguments, more)
    check_equal(committed, reference.commit(theirs, *arguments, more))
    assert torch.equal(committed.report[:, -5:], more)


@pytest.mark.slow
@pytest.mark.parametrize("max_draft_tokens", [0, 9, 1000])
def test_commit_allows_as_many_drafts_as_the_limit_rule(max_draft_tokens: int) -> None:
    size = 64
    generator = torch.Generator().manual_seed(max_draft_tokens)

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator).to(DEVICE)

    state = make_device_batch(size, 1, 8, DEVICE, None)
    state.max_drafts[:size], state.capacity[:size] = whole(0, 9), whole(0, 25)
    state.max_depths.copy_(state.max_drafts)
    state.num_computed[:size], state.limits[:size] = whole(0, 20), whole(21, 40)
    slots = torch.arange(size, device=DEVICE)
    nothing = torch.zeros(size, 0, dtype=torch.int64, device=DEVICE)
    sampled = torch.zeros(size, 1, dtype=torch.int64, device=DEVICE)
    columns = (state.num_computed[slots], 0 * slots, 0 * slots + 1, slots, slots)
    counts = StepCounts(*(column.clone() for column in columns), nothing)
    committed = gpu.commit(
        state,
        slots,
        counts,
        nothing,
        sampled,
        torch.ones_like(sampled).bool(),
        max_draft_tokens,
        100,
    )
    expected = draft_limit(
        state.max_drafts[slots],
        counts.num_computed + 2,  # the newest token was computed, another was sampled
        state.limits[slots],
        state.capacity[slots],
        max_draft_tokens,
    )
    assert committed.num_drafts.tolist() == expected.tolist() == state.num_drafts[slots].tolist()


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_stored_drafts_stand_in_their_slots_alone(depth: int) -> None:
    state = make_device_batch(6, 2, 5, DEVICE, None)
    state.drafts.fill_(-7)
    slots = torch.tensor([4, 1, 6], device=DEVICE)
    drafts = torch.arange(3 * depth, device=DEVICE).view(3, depth)
    expected = state.drafts.clone()
    expected[slots, :depth] = drafts
    gpu.store_drafts(state, slots, drafts)
    assert torch.equal(state.drafts, expected)

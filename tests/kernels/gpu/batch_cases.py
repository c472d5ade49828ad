"""Random batches, and each operation of kernels/reference/batch.py as a slow loop over slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.device_batch import (
    HEADER,
    DeviceBatch,
    RowPlan,
    StepCounts,
    TreeRows,
    make_device_batch,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 10
VOCAB = 4  # few, so that drafts often agree
BLOCK_SIZE = 3
PADDING_SLOT = 999


@dataclass(frozen=True)
class Case:
    """A state, a step's slots with padding among them, and what it would sample."""

    state: DeviceBatch
    slots: Tensor  # [B]
    caps: Tensor  # [B]
    depth: int
    max_draft_tokens: int
    drafts: Tensor  # [B, K]
    sampled_token_ids: Tensor  # [B, K+1]
    usable: Tensor  # [B, K+1]
    max_depth: int
    rows_per_depth: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_slots, depth = draw(st.integers(1, 6)), draw(st.integers(0, 7))
    max_drafts, has_trees = depth + draw(st.integers(0, 2)), draw(st.booleans())
    state = _random_state(num_slots, max_drafts, has_trees, generator)
    order = torch.randperm(num_slots, generator=generator)[: draw(st.integers(1, num_slots))]
    slots = torch.cat((order, torch.full((draw(st.integers(0, 3)),), num_slots)))
    caps = torch.randint(depth + 2, (len(slots),), generator=generator)
    shape = (len(slots), depth + 1)
    sampled_token_ids = torch.randint(VOCAB, shape, generator=generator)
    drafts = sampled_token_ids[:, :-1].clone()
    wrong = torch.rand(drafts.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    drafts[wrong] = VOCAB
    broken = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
    reach = draw(st.sampled_from([0, 8, 14, 1000]))
    slots, caps, *tokens = (t.to(DEVICE) for t in (slots, caps, drafts, sampled_token_ids, ~broken))
    max_depth = draw(st.sampled_from([0, 0, 1, 3, 8, 100]))
    rows_per_depth = draw(st.sampled_from([1, 1, 8]))
    return Case(_on_device(state), slots, caps, depth, reach, *tokens, max_depth, rows_per_depth)


def _random_state(
    num_slots: int, max_drafts: int, has_trees: bool, generator: torch.Generator
) -> DeviceBatch:
    """Slots at any point of a request, some ended; the padding as it is made."""
    cpu = torch.device("cpu")
    state = make_device_batch(num_slots, 9, max_drafts, cpu, None, has_trees=has_trees)

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_slots,), generator=generator)

    real = slice(0, num_slots)
    state.block_tables[0, real] = torch.randint(50, (num_slots, 9), generator=generator).int()
    state.num_prompt[real] = whole(1, 12)
    state.num_computed[real] = state.num_prompt[real] + whole(0, 10)
    state.limits[real] = state.num_computed[real] + whole(-1, 12)
    state.limits[real] *= whole(0, 5).clamp(max=1)  # one in five has ended
    state.capacity[real] = state.num_computed[real] + whole(1, 14)
    state.max_drafts[real] = whole(0, max_drafts + 2)
    state.max_depths[real] = whole(0, 9) if has_trees else state.max_drafts[real]
    for column in state.trees or ():
        column.copy_(torch.randint(99, column.shape, generator=generator))
    state.num_drafts[real] = whole(0, max_drafts + 1)
    state.last_tokens[real] = whole(0, VOCAB)
    state.drafts[real] = torch.randint(VOCAB, state.drafts[real].shape, generator=generator)
    return state


def _on_device(state: DeviceBatch) -> DeviceBatch:
    return _mapped(state, lambda t: t.to(DEVICE))


def copied(state: DeviceBatch) -> DeviceBatch:
    return _mapped(state, torch.clone)


def _mapped(state: DeviceBatch, change: Callable[[Tensor], Tensor]) -> DeviceBatch:
    trees = None if state.trees is None else TreeRows(*map(change, state.trees))
    rest = state._replace(trees=None)
    return DeviceBatch(*(t if t is None else change(t) for t in rest))._replace(trees=trees)


def slow_begin_step(case: Case) -> StepCounts:
    state, rows, drafts = case.state, [], []
    for slot, cap in zip(case.slots.tolist(), case.caps.tolist(), strict=True):
        computed, limit = int(state.num_computed[slot]), int(state.limits[slot])
        num_tokens = computed + 1
        # Draft d is verified at position computed + d, which must be one of the slot's blocks.
        count = 0
        while count < min(
            int(state.num_drafts[slot]), cap, case.depth
        ) and computed + count + 1 < int(state.capacity[slot]):
            count += 1
        verified = count + 1 if num_tokens < limit else 0
        outputs = num_tokens - int(state.num_prompt[slot])
        rows.append((computed, count, verified, outputs, int(state.last_tokens[slot])))
        drafts.append(state.drafts[slot, : case.depth])
    columns = torch.tensor(rows, device=case.slots.device).t().contiguous()
    tree = None
    if state.trees is not None:
        parents, *others = state.trees
        tree = TreeRows(
            parents[case.slots][:, : case.depth],
            *(column[case.slots][:, : case.depth + 1] for column in others),
        )
    return StepCounts(*columns, torch.stack(drafts), tree)


def slow_plan_rows(
    block_tables: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows_per_item: int,
    max_position: int,
) -> RowPlan:
    ends, positions, slots = [], [], []
    for table, start, count in zip(tables.tolist(), starts.tolist(), counts.tolist(), strict=True):
        ends.append(start + count if count else 0)
        for j in range(rows_per_item):
            positions.append(min(start + j, max_position))
            if j < count:
                block = int(block_tables[table, (start + j) // BLOCK_SIZE])
                slots.append(block * BLOCK_SIZE + (start + j) % BLOCK_SIZE)
            else:
                slots.append(PADDING_SLOT)
    device = tables.device
    return RowPlan(
        tables.int(),
        starts.int(),
        torch.tensor(ends, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(slots, device=device),
    )


def slow_expand_rows(real: Tensor, num_real: Tensor, mask: Tensor, num_rows: int) -> Tensor:
    out = []
    for slot, count in enumerate(num_real.tolist()):
        out += [real[slot, r] if r < count else mask for r in range(num_rows)]
    return torch.stack(out)


def slow_draft_limit(
    max_drafts: int,
    num_tokens: int,
    limit: int,
    capacity: int,
    max_draft_tokens: int,
    rows_per_depth: int = 1,
) -> int:
    """One draft after the other, while each has a place.

    Draft d stands at position num_tokens + d - 1, and a bonus token must fit behind it. The
    drafter's row that makes it stands two positions before it, and is written to its cache; or,
    of several for each draft but the first, the last one.
    """
    count = 0
    while (
        count < max_drafts
        and num_tokens + (count + 1) + 1 <= limit
        and num_tokens - 2 + count * rows_per_depth < capacity
        and num_tokens + (count + 1) - 1 <= max_draft_tokens
    ):
        count += 1
    return count


def slow_commit(case: Case, counts: StepCounts) -> tuple[DeviceBatch, Tensor, list[int], list[int]]:
    """The state after the step, its report, how deep each slot drafts, and how many of its new
    rows the drafter reads."""
    state = copied(case.state)
    report, depths, reads = [], list[int](), list[int]()
    for row, slot in enumerate(case.slots.tolist()):
        sampled, drafts = case.sampled_token_ids[row].tolist(), case.drafts[row].tolist()
        num_drafts = int(counts.num_drafts[row])
        new_ids: list[int] = []
        broken = False
        while int(counts.num_rows[row]) and not broken:
            at = len(new_ids)
            broken = not bool(case.usable[row, at])
            new_ids.append(sampled[at])
            if not (at < num_drafts and drafts[at] == sampled[at]):
                break
        if broken:
            new_ids = []  # the step is done again, without drafts
            state.max_drafts[slot] = 0
            if num_drafts == 0:
                state.limits[slot] = 0
        if new_ids:
            state.last_tokens[slot] = new_ids[-1]
        num_computed = int(counts.num_computed[row]) + len(new_ids)
        state.num_computed[slot] = num_computed
        num_depths = slow_draft_limit(
            min(int(state.max_drafts[slot]), int(state.max_depths[slot])),
            num_computed + 1,
            int(state.limits[slot]),
            int(state.capacity[slot]),
            case.max_draft_tokens,
            case.rows_per_depth,
        )
        reads.append(len(new_ids) if num_depths else 0)  # it may draft later, if not now
        num_depths = min(num_depths, case.max_depth)
        state.num_drafts[slot] = num_depths
        if state.trees is not None:  # as many nodes as it asks for, if any depth is left
            state.num_drafts[slot] = int(state.max_drafts[slot]) if num_depths else 0
        depths.append(num_depths)
        report.append([len(new_ids), num_drafts, int(broken and num_drafts == 0), *sampled])
    assert len(report[0]) == HEADER + case.depth + 1
    return state, torch.tensor(report, device=case.slots.device), depths, reads


def check_equal(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """Tuples of tensors, and of such tuples; to the bit."""
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, tuple):
            check_equal(mine, other)
        elif mine is not None or other is not None:
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)


def check_states(ours: DeviceBatch, theirs: DeviceBatch) -> None:
    """Equal to the bit in every slot but the padding, which must only stay ended."""
    assert torch.equal(ours.numbers[:, :-1], theirs.numbers[:, :-1])
    assert torch.equal(ours.fractions, theirs.fractions)
    assert torch.equal(ours.block_tables, theirs.block_tables)
    assert torch.equal(ours.drafts, theirs.drafts)
    for state in (ours, theirs):
        assert (
            int(state.limits[-1]) == int(state.num_computed[-1]) == int(state.num_drafts[-1]) == 0
        )

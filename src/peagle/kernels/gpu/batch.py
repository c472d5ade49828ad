"""The bookkeeping of a step on the device, one small kernel each.

The reference is kernels/reference/batch.py. As torch operations this is about sixty launches of a
microsecond's work each. One program per slot: a slot's numbers fit in registers.

Shapes: B slots of the step, Q rows per slot, K draft tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.device_batch import (
    HEADER,
    Committed,
    DeviceBatch,
    RowPlan,
    StepCounts,
    TreeRows,
)
from peagle.kernels.gpu.overlap import overlapping, wait


@triton.jit
def _begin(
    slots, caps, last_tokens, computed, limits, prompt, num_drafts, capacity, drafts,
    parents, depths, ancestors, out, out_drafts, out_parents, out_depths, out_ancestors,
    depth, width, batch, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    num_computed = tl.load(computed + slot)
    num_tokens = num_computed + 1
    running = num_tokens < tl.load(limits + slot)
    drafted = tl.minimum(tl.load(num_drafts + slot), tl.load(caps + b))
    drafted = tl.minimum(drafted, tl.load(capacity + slot) - num_tokens)
    drafted = tl.maximum(tl.minimum(drafted, depth), 0)
    tl.store(out + b, num_computed)
    tl.store(out + batch + b, drafted)
    tl.store(out + 2 * batch + b, tl.where(running, drafted + 1, 0))
    tl.store(out + 3 * batch + b, num_tokens - tl.load(prompt + slot))
    tl.store(out + 4 * batch + b, tl.load(last_tokens + slot))
    offset = tl.arange(0, DEPTH)
    there = offset < depth
    tokens = tl.load(drafts + slot * width + offset, mask=there, other=0)
    tl.store(out_drafts + b * depth + offset, tokens, mask=there)
    if parents is not None:
        own = tl.load(parents + slot * width + offset, mask=there, other=0)
        tl.store(out_parents + b * depth + offset, own, mask=there)
        is_row = offset <= depth
        source, place = slot * (width + 1) + offset, b * (depth + 1) + offset
        tl.store(out_depths + place, tl.load(depths + source, mask=is_row, other=0), mask=is_row)
        bits = tl.load(ancestors + source, mask=is_row, other=0)
        tl.store(out_ancestors + place, bits, mask=is_row)


def begin_step(state: DeviceBatch, slots: Tensor, caps: Tensor, depth: int) -> StepCounts:
    batch, width = slots.shape[0], state.drafts.shape[1]
    assert depth <= width
    out = torch.empty(5, batch, dtype=torch.int64, device=slots.device)
    drafts = torch.empty(batch, depth, dtype=torch.int64, device=slots.device)
    tree = None
    if state.trees is not None:
        rows = torch.empty(2, batch, depth + 1, dtype=torch.int64, device=slots.device)
        tree = TreeRows(torch.empty_like(drafts), *rows.unbind(0))
    _begin[(batch,)](
        slots, caps, state.last_tokens, state.num_computed, state.limits, state.num_prompt,
        state.num_drafts, state.capacity, state.drafts, *(state.trees or (None,) * 3), out, drafts,
        *(tree or (None,) * 3), depth, width, batch,
        DEPTH=triton.next_power_of_2(depth + 1), num_warps=1,
        **overlapping(),
    )  # fmt: skip
    return StepCounts._make([*out.unbind(0), drafts, tree])


@triton.jit
def _plan(
    block_tables, tables, starts, counts, depths, row_starts, out_tables, out_starts, out_ends,
    positions, slots, num_columns, rows, block_size, padding_slot, max_position, first_row,
    ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    table = tl.load(tables + b)
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    offset = tl.arange(0, ROWS).to(tl.int64)
    inside = offset < rows
    position = start + first_row + offset
    is_real = offset < count
    column = tl.minimum(position // block_size, num_columns - 1)
    block = tl.load(block_tables + table * num_columns + column, mask=inside, other=0).to(tl.int64)
    slot = tl.where(is_real, block * block_size + position % block_size, padding_slot)
    place = b.to(tl.int64) * rows + offset
    if depths is not None:
        position = start + tl.load(depths + place, mask=inside, other=0)
    if row_starts is not None:
        first = tl.load(row_starts + b)
        inside = inside & (offset < tl.load(row_starts + b + 1) - first)
        place = first + offset
    tl.store(positions + place, tl.minimum(position, max_position), mask=inside)
    tl.store(slots + place, slot, mask=inside)
    tl.store(out_tables + b, table.to(tl.int32))
    tl.store(out_starts + b, start.to(tl.int32))
    tl.store(out_ends + b, tl.where(count > 0, start + first_row + count, 0).to(tl.int32))


def plan_rows(
    block_tables: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows_per_item: int,
    block_size: int,
    padding_slot: int,
    max_position: int,
    positions: Tensor,
    slots: Tensor,
    depths: Tensor | None = None,
    first_row: int = 0,
    row_starts: Tensor | None = None,
) -> RowPlan:
    batch = tables.shape[0]
    small = torch.empty(3, batch, dtype=torch.int32, device=tables.device)
    _plan[(batch,)](
        block_tables, tables, starts, counts, depths, row_starts, *small.unbind(0), positions,
        slots, block_tables.shape[1], rows_per_item, block_size, padding_slot, max_position,
        first_row, ROWS=triton.next_power_of_2(rows_per_item), num_warps=1,
        **overlapping(),
    )  # fmt: skip
    return RowPlan(small[0], small[1], small[2], positions, slots)


@triton.jit
def _commit(
    slots, num_computed, num_drafts, num_rows, num_outputs, drafts, sampled, usable, last_tokens,
    computed, limits, max_drafts, max_depths, next_drafts, capacity, more, report, out, depth,
    max_draft_tokens, max_depth, rows_per_depth, num_more, batch, HEADER: tl.constexpr,
    DEPTH: tl.constexpr, MORE: tl.constexpr, HAS_TREES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    drafted = tl.load(num_drafts + b)
    running = tl.load(num_rows + b) > 0
    offset = tl.arange(0, DEPTH)
    in_row = offset <= depth
    token = tl.load(sampled + b * (depth + 1) + offset, mask=in_row, other=-1)
    is_usable = tl.load(usable + b * (depth + 1) + offset, mask=in_row, other=0) != 0
    draft = tl.load(drafts + b * depth + offset, mask=offset < depth, other=-2)
    agrees = (draft == token) & is_usable & (offset < drafted) & (offset < depth)
    # The first place that does not agree; there always is one, since drafts end before DEPTH.
    num_accepted = tl.min(tl.where(agrees, DEPTH, offset), axis=0)
    here = offset == num_accepted
    broken = running & (tl.sum((here & is_usable).to(tl.int32), axis=0) == 0)
    failed = broken & (drafted == 0)
    num_new = tl.where(running & (broken == 0), num_accepted + 1, 0).to(tl.int64)
    last = tl.sum(tl.where(offset == num_new - 1, token, 0), axis=0)
    now_computed = tl.load(num_computed + b) + num_new
    limit = tl.where(failed, 0, tl.load(limits + slot))
    allowed = tl.where(broken, 0, tl.load(max_drafts + slot))
    # speculation/draft_limit.py
    num_tokens = now_computed + 1
    following = tl.minimum(allowed, tl.load(max_depths + slot))
    following = tl.minimum(following, limit - num_tokens - 1)
    room = tl.load(capacity + slot) - num_tokens + 1
    following = tl.minimum(following, (room + rows_per_depth) // rows_per_depth)
    following = tl.maximum(tl.minimum(following, max_draft_tokens - num_tokens + 1), 0)
    num_real = tl.where(following > 0, num_new, 0)
    following = tl.minimum(following, max_depth)
    tl.store(last_tokens + slot, last, mask=num_new > 0)
    tl.store(computed + slot, now_computed)
    tl.store(limits + slot, limit)
    tl.store(max_drafts + slot, allowed)
    if HAS_TREES:
        tl.store(next_drafts + slot, tl.where(following > 0, allowed, 0))
    else:
        tl.store(next_drafts + slot, following)
    tl.store(out + b, tl.load(num_outputs + b) + num_new)
    tl.store(out + batch + b, following)
    tl.store(out + 2 * batch + b, num_real)
    tl.store(out + 3 * batch + b, num_real + tl.maximum(following - 1, 0))
    place = report + b * (HEADER + depth + 1 + num_more)
    tl.store(place, num_new)
    tl.store(place + 1, drafted)
    tl.store(place + 2, failed.to(tl.int64))
    tl.store(place + HEADER + offset, token, mask=in_row)
    if more is not None:
        column = tl.arange(0, MORE)
        value = tl.load(more + b * num_more + column, mask=column < num_more, other=0)
        tl.store(place + HEADER + depth + 1 + column, value, mask=column < num_more)


def commit(
    state: DeviceBatch,
    slots: Tensor,
    counts: StepCounts,
    drafts: Tensor,
    sampled_token_ids: Tensor,
    usable: Tensor,
    max_draft_tokens: int,
    max_depth: int,
    rows_per_depth: int = 1,
    more: Tensor | None = None,
) -> Committed:
    batch, depth = drafts.shape
    num_more = 0 if more is None else more.shape[1]
    width = HEADER + depth + 1 + num_more
    report = torch.empty(batch, width, dtype=torch.int64, device=slots.device)
    out = torch.empty(4, batch, dtype=torch.int64, device=slots.device)
    _commit[(batch,)](
        slots, counts.num_computed, counts.num_drafts, counts.num_rows, counts.num_outputs,
        drafts.contiguous(), sampled_token_ids.contiguous(), usable.contiguous().view(torch.int8),
        state.last_tokens, state.num_computed, state.limits, state.max_drafts, state.max_depths,
        state.num_drafts, state.capacity, more, report, out, depth, max_draft_tokens, max_depth,
        rows_per_depth, num_more, batch, HEADER=HEADER, DEPTH=triton.next_power_of_2(depth + 2),
        MORE=triton.next_power_of_2(max(num_more, 1)),
        HAS_TREES=state.trees is not None, num_warps=1, **overlapping(),
    )  # fmt: skip
    return Committed(report, *out.unbind(0))


@triton.jit
def _store_drafts(
    slots, drafts, out, depth, width, DEPTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    offset = tl.arange(0, DEPTH)
    there = offset < depth
    token = tl.load(drafts + b * depth + offset, mask=there, other=0)
    tl.store(out + slot * width + offset, token, mask=there)


def store_drafts(state: DeviceBatch, slots: Tensor, drafts: Tensor) -> None:
    (batch, depth), width = drafts.shape, state.drafts.shape[1]
    _store_drafts[(batch,)](
        slots, drafts.contiguous(), state.drafts, depth, width,
        DEPTH=triton.next_power_of_2(depth), num_warps=1, **overlapping(),
    )  # fmt: skip

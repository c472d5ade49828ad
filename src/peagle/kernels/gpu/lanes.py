"""The bookkeeping of a step on the device, one small kernel each; twins: kernels/plain/lanes.py.

As torch operations this is about sixty launches of a microsecond's work each. One program per
lane: a lane's numbers fit in registers.

Shapes: B lanes of the batch, Q rows per lane, K draft tokens, H hidden, C tapped width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.gpu.row_copies import keep_taps
from peagle.kernels.lane_state import LaneState, RowPlan, StepCounts
from peagle.kernels.plain.lanes import HEADER


@triton.jit
def _begin(
    lanes, computed, limits, prompt, wanted, starts, last_tokens, pending_tokens, out, pending,
    depth, max_pending, max_draft_tokens, batch, width, DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    lane = tl.load(lanes + b)
    num_computed = tl.load(computed + lane)
    limit = tl.load(limits + lane)
    draft_start = tl.load(starts + lane)
    num_tokens = num_computed + 1
    running = num_tokens < limit
    num_drafts = tl.minimum(tl.load(wanted + lane), limit - num_tokens - 1)
    num_drafts = tl.minimum(num_drafts, max_draft_tokens - num_tokens + 1)
    num_drafts = tl.maximum(tl.minimum(num_drafts, depth), 0)
    num_pending = tl.minimum(num_computed - draft_start, max_pending)
    num_pending = tl.where(running, num_pending, 0)
    num_masks = tl.maximum(num_drafts - 1, 0)
    tl.store(out + b, num_computed)
    tl.store(out + batch + b, draft_start)
    tl.store(out + 2 * batch + b, num_pending)
    tl.store(out + 3 * batch + b, num_drafts)
    tl.store(out + 4 * batch + b, tl.where(running, num_pending + num_masks, 0))
    tl.store(out + 5 * batch + b, tl.where(running, num_drafts + 1, 0))
    tl.store(out + 6 * batch + b, num_tokens - tl.load(prompt + lane))
    tl.store(out + 7 * batch + b, tl.load(last_tokens + lane))
    offset = tl.arange(0, DEPTH)
    there = offset < width
    tokens = tl.load(pending_tokens + lane * max_pending + offset, mask=there, other=0)
    tl.store(pending + b * width + offset, tokens, mask=there)


def begin_step(state: LaneState, lanes: Tensor, depth: int, max_draft_tokens: int) -> StepCounts:
    batch, max_pending = lanes.shape[0], state.pending_tokens.shape[1]
    width = min(depth + 1, max_pending)
    out = torch.empty(8, batch, dtype=torch.int64, device=lanes.device)
    pending = torch.empty(batch, width, dtype=torch.int64, device=lanes.device)
    _begin[(batch,)](
        lanes, state.num_computed, state.limits, state.num_prompt, state.wanted_drafts,
        state.draft_starts, state.last_tokens, state.pending_tokens, out, pending,
        depth, max_pending, max_draft_tokens, batch, width,
        DEPTH=triton.next_power_of_2(max(width, 1)), num_warps=1,
        **overlapping(),
    )  # fmt: skip
    return StepCounts._make([*out.unbind(0), pending])


@triton.jit
def _plan(
    block_tables, tables, starts, counts, out_tables, out_starts, out_ends, positions, slots,
    num_columns, rows, block_size, trash_slot, max_position, ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    table = tl.load(tables + b)
    start = tl.load(starts + b)
    count = tl.load(counts + b)
    offset = tl.arange(0, ROWS).to(tl.int64)
    inside = offset < rows
    position = start + offset
    is_real = offset < count
    column = tl.minimum(position // block_size, num_columns - 1)
    block = tl.load(block_tables + table * num_columns + column, mask=inside, other=0).to(tl.int64)
    slot = tl.where(is_real, block * block_size + position % block_size, trash_slot)
    place = b.to(tl.int64) * rows + offset
    tl.store(positions + place, tl.minimum(position, max_position), mask=inside)
    tl.store(slots + place, slot, mask=inside)
    tl.store(out_tables + b, table.to(tl.int32))
    tl.store(out_starts + b, start.to(tl.int32))
    tl.store(out_ends + b, tl.where(count > 0, start + count, 0).to(tl.int32))


def plan_rows(
    block_tables: Tensor,
    tables: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows_per_item: int,
    block_size: int,
    trash_slot: int,
    max_position: int,
) -> RowPlan:
    batch, device = tables.shape[0], tables.device
    small = torch.empty(3, batch, dtype=torch.int32, device=device)
    # Both begin at multiples of 16 bytes, even of a single row: Triton compiles another form of a
    # kernel where a pointer does not, and one row is to have the bits that it has among several.
    count = batch * rows_per_item
    large = torch.empty(2, count + count % 2, dtype=torch.int64, device=device)[:, :count]
    _plan[(batch,)](
        block_tables, tables, starts, counts, small[0], small[1], small[2], large[0], large[1],
        block_tables.shape[1], rows_per_item, block_size, trash_slot, max_position,
        ROWS=triton.next_power_of_2(rows_per_item), num_warps=1,
        **overlapping(),
    )  # fmt: skip
    return RowPlan(small[0], small[1], small[2], large[0], large[1])


@triton.jit
def _commit(
    lanes, num_computed, num_drafts, num_verify_rows, drafts, chosen, usable,
    last_tokens, computed, limits, wanted, starts, pending_tokens, report,
    depth, width, HEADER: tl.constexpr, KEEPS_TAPS: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    b = tl.program_id(0)
    lane = tl.load(lanes + b)
    drafted = tl.load(num_drafts + b)
    num_verify = tl.load(num_verify_rows + b)
    running = num_verify > 0
    offset = tl.arange(0, DEPTH)
    in_row = offset <= depth
    token = tl.load(chosen + b * (depth + 1) + offset, mask=in_row, other=-1)
    is_usable = tl.load(usable + b * (depth + 1) + offset, mask=in_row, other=0) != 0
    draft = tl.load(drafts + b * depth + offset, mask=offset < depth, other=-2)
    agrees = (draft == token) & is_usable & (offset < drafted) & (offset < depth)
    # The first place that does not agree; there always is one, since drafts end before DEPTH.
    num_accepted = tl.min(tl.where(agrees, DEPTH, offset), axis=0)
    here = offset == num_accepted
    broken = running & (tl.sum((here & is_usable).to(tl.int32), axis=0) == 0)
    failed = broken & (drafted == 0)
    num_new = tl.where(broken | (num_verify == 0), 0, num_accepted + 1).to(tl.int64)
    last = tl.sum(tl.where(offset == num_new - 1, token, 0), axis=0)
    old = tl.load(num_computed + b)
    tl.store(last_tokens + lane, last, mask=num_new > 0)
    tl.store(computed + lane, old + num_new)
    tl.store(limits + lane, tl.zeros((), tl.int64), mask=failed)
    tl.store(wanted + lane, tl.zeros((), tl.int64), mask=broken)
    if KEEPS_TAPS:
        tl.store(starts + lane, old)
        tl.store(pending_tokens + lane * width + offset, token, mask=in_row)
    place = report + b * (HEADER + depth + 1)
    tl.store(place, num_new)
    tl.store(place + 1, drafted)
    tl.store(place + 2, failed.to(tl.int64))
    tl.store(place + HEADER + offset, token, mask=in_row)


def commit(
    state: LaneState,
    lanes: Tensor,
    counts: StepCounts,
    drafts: Tensor,
    chosen: Tensor,
    usable: Tensor,
    taps: Tensor | None,
) -> Tensor:
    batch, depth = drafts.shape
    width = state.pending_tokens.shape[1]
    report = torch.empty(batch, HEADER + depth + 1, dtype=torch.int64, device=lanes.device)
    _commit[(batch,)](
        lanes, counts.num_computed, counts.num_drafts, counts.num_verify_rows,
        drafts.contiguous(), chosen.contiguous(), usable.contiguous().view(torch.int8),
        state.last_tokens, state.num_computed, state.limits, state.wanted_drafts,
        state.draft_starts, state.pending_tokens, report, depth, width,
        HEADER=HEADER, KEEPS_TAPS=taps is not None, DEPTH=triton.next_power_of_2(depth + 2),
        num_warps=1, **overlapping(),
    )  # fmt: skip
    if taps is not None:
        keep_taps(state.pending_taps, lanes, taps)
    return report

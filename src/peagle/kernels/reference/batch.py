"""The bookkeeping of a step on the device, as torch operations.

Shapes: B slots of the step, Q rows per slot, K draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.device_batch import Committed, DeviceBatch, RowPlan, StepCounts, TreeRows
from peagle.speculation.draft_limit import draft_limit


def begin_step(state: DeviceBatch, slots: Tensor, caps: Tensor, depth: int) -> StepCounts:
    """Where the slots [B] stand, and how many of their drafts each verifies: at most `caps` [B],
    which is what the step has rows for, at most K = `depth`, and no more than blocks have room for.
    """
    num_computed, limits = state.num_computed[slots], state.limits[slots]
    num_tokens = num_computed + 1
    running = num_tokens < limits
    has_room = state.capacity[slots] - num_tokens
    num_drafts = torch.minimum(torch.minimum(state.num_drafts[slots], caps), has_room)
    num_drafts = num_drafts.clamp(0, depth)
    return StepCounts(
        num_computed=num_computed,
        num_drafts=num_drafts,
        num_rows=torch.where(running, num_drafts + 1, 0),
        num_outputs=num_tokens - state.num_prompt[slots],
        last_tokens=state.last_tokens[slots],
        drafts=state.drafts[slots, :depth],
        tree=None if state.trees is None else _rows_of(state.trees, slots, depth),
    )


def _rows_of(trees: TreeRows, slots: Tensor, num_drafts: int) -> TreeRows:
    parents, depths, ancestors = trees
    return TreeRows(
        parents[slots, :num_drafts],
        depths[slots, : num_drafts + 1],
        ancestors[slots, : num_drafts + 1],
    )


def plan_rows(
    block_tables: Tensor,  # [T, M] int32
    tables: Tensor,  # [B]
    starts: Tensor,  # [B] position of each first row
    counts: Tensor,  # [B] how many of the Q rows are real
    rows_per_item: int,
    block_size: int,
    padding_slot: int,
    max_position: int,
    positions: Tensor,  # [B * Q], or [R] where the items share rows: written
    slots: Tensor,  # the same
    depths: Tensor | None = None,  # [B, Q] of rows of trees: their positions behind `starts`
    first_row: int = 0,  # of each tree
    row_starts: Tensor | None = None,  # [B + 1] where they share rows: see kernels/rows.py
) -> RowPlan:
    """Positions and slots of the rows; those beyond `counts` go to the padding slot."""
    offsets = torch.arange(rows_per_item, device=starts.device)  # [Q]
    places = starts[:, None] + first_row + offsets  # [B, Q]
    is_real = offsets < counts[:, None]
    column = (places // block_size).clamp(max=block_tables.shape[1] - 1)
    blocks = block_tables[tables[:, None], column].long()
    in_cache = torch.where(is_real, blocks * block_size + places % block_size, padding_slot)
    behind = places if depths is None else starts[:, None] + depths
    is_there = torch.ones_like(is_real)
    if row_starts is not None:
        is_there = offsets < row_starts.diff()[:, None]
    slots.copy_(in_cache[is_there])
    positions.copy_(behind.clamp(max=max_position)[is_there])
    ends = torch.where(counts > 0, starts + first_row + counts, 0)
    return RowPlan(tables.int(), starts.int(), ends.int(), positions, slots)


def commit(
    state: DeviceBatch,
    slots: Tensor,  # [B]
    counts: StepCounts,
    drafts: Tensor,  # [B, K]
    sampled_token_ids: Tensor,  # [B, K+1] the target's token after each prefix of the drafts
    usable: Tensor,  # [B, K+1] bool: False where nothing could be sampled
    max_draft_tokens: int,  # a request with more tokens is beyond the drafter's positions
    max_depth: int,  # drafts one behind the other that this step makes for the next; 0: none
    rows_per_depth: int = 1,  # of the drafter's cache
    more: Tensor | None = None,  # [B, n] that the host reads, too
) -> Committed:
    """Advances the slots.

    Drafts are kept while they are what the target sampled. Where no token could be sampled behind
    them, a draft may be the cause: the step is done again, from now on without any. A request
    that fails without drafts is reported as failed and ends.
    """
    depth = drafts.shape[1]
    offsets = torch.arange(depth + 1, device=slots.device)
    running = counts.num_rows > 0
    is_draft = offsets[:-1] < counts.num_drafts[:, None]
    agrees = (drafts == sampled_token_ids[:, :-1]) & usable[:, :-1] & is_draft
    num_accepted = agrees.long().cumprod(1).sum(1)  # [B]
    broken = running & ~usable.gather(1, num_accepted[:, None])[:, 0]
    failed = broken & (counts.num_drafts == 0)
    num_new = torch.where(running & ~broken, num_accepted + 1, 0)

    last = sampled_token_ids.gather(1, (num_new - 1).clamp(min=0)[:, None])[:, 0]
    num_computed = counts.num_computed + num_new
    limits = torch.where(failed, 0, state.limits[slots])
    max_drafts = torch.where(broken, 0, state.max_drafts[slots])
    capacity = state.capacity[slots]
    num_depths = torch.minimum(max_drafts, state.max_depths[slots])
    num_depths = draft_limit(
        num_depths, num_computed + 1, limits, capacity, max_draft_tokens, rows_per_depth
    )
    num_real = torch.where(num_depths > 0, num_new, 0)
    num_drafts = num_depths = num_depths.clamp(max=max_depth)
    if state.trees is not None:  # as many nodes as it asks for; begin_step looks for their room
        num_drafts = torch.where(num_depths > 0, max_drafts, 0)
    state.last_tokens[slots] = torch.where(num_new > 0, last, counts.last_tokens)
    state.num_computed[slots] = num_computed
    state.limits[slots] = limits
    state.max_drafts[slots] = max_drafts
    state.num_drafts[slots] = num_drafts
    header = torch.stack((num_new, counts.num_drafts, failed.long()), dim=1)
    return Committed(
        report=torch.cat((header, sampled_token_ids, *([] if more is None else [more])), dim=1),
        num_outputs=counts.num_outputs + num_new,
        num_drafts=num_depths,
        num_real=num_real,
        num_rows=num_real + (num_depths - 1).clamp(min=0),
    )


def store_drafts(state: DeviceBatch, slots: Tensor, drafts: Tensor) -> None:
    """Drafts [B, K] for the next step of these slots [B]."""
    state.drafts[slots, : drafts.shape[1]] = drafts

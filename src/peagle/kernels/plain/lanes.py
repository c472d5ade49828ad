"""The bookkeeping of a step on the device, as plain torch operations.

Shapes: B lanes of the batch, Q rows per lane, K draft tokens, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.lane_state import LaneState, RowPlan, StepCounts

HEADER = 3  # columns of a step's report before the tokens: num_new, num_drafts, failed


def begin_step(state: LaneState, lanes: Tensor, depth: int, max_draft_tokens: int) -> StepCounts:
    """Where the lanes [B] stand, and how many of `depth` drafts each verifies.

    A request longer than `max_draft_tokens` tokens is beyond the drafter's positions.
    """
    num_computed, limits = state.num_computed[lanes], state.limits[lanes]
    draft_starts = state.draft_starts[lanes]
    num_tokens = num_computed + 1
    running = num_tokens < limits
    until_end = limits - num_tokens - 1  # the bonus token takes the last place
    in_reach = max_draft_tokens - num_tokens + 1
    num_drafts = torch.minimum(torch.minimum(state.wanted_drafts[lanes], until_end), in_reach)
    num_drafts = num_drafts.clamp(0, depth)
    num_pending = (num_computed - draft_starts).clamp(max=state.pending_tokens.shape[1])
    num_pending = torch.where(running, num_pending, 0)
    return StepCounts(
        num_computed=num_computed,
        draft_starts=draft_starts,
        num_pending=num_pending,
        num_drafts=num_drafts,
        num_draft_rows=torch.where(running, num_pending + (num_drafts - 1).clamp(min=0), 0),
        num_verify_rows=torch.where(running, num_drafts + 1, 0),
        num_outputs=num_tokens - state.num_prompt[lanes],
        last_tokens=state.last_tokens[lanes],
        pending_tokens=state.pending_tokens[lanes, : depth + 1],
    )


def plan_rows(
    block_tables: Tensor,  # [T, M] int32
    tables: Tensor,  # [B]
    starts: Tensor,  # [B] position of each first row
    counts: Tensor,  # [B] how many of the Q rows are real
    rows_per_item: int,
    block_size: int,
    trash_slot: int,
    max_position: int,
) -> RowPlan:
    """Positions and slots of the rows; those beyond `counts` go to the trash slot."""
    offsets = torch.arange(rows_per_item, device=starts.device)  # [Q]
    positions = starts[:, None] + offsets  # [B, Q]
    is_real = offsets < counts[:, None]
    column = (positions // block_size).clamp(max=block_tables.shape[1] - 1)
    blocks = block_tables[tables[:, None], column].long()
    slots = torch.where(is_real, blocks * block_size + positions % block_size, trash_slot)
    ends = torch.where(counts > 0, starts + counts, 0)
    positions = positions.clamp(max=max_position)
    return RowPlan(tables.int(), starts.int(), ends.int(), positions.flatten(), slots.flatten())


def commit(
    state: LaneState,
    lanes: Tensor,  # [B]
    counts: StepCounts,
    drafts: Tensor,  # [B, K]
    chosen: Tensor,  # [B, K+1] the target's choice after each prefix of the drafts
    usable: Tensor,  # [B, K+1] bool: False where nothing could be chosen
    taps: Tensor | None,  # [B, K+1, C]
) -> Tensor:
    """Advances the lanes; -> the report [B, HEADER + K+1] int64 that the host reads.

    Drafts are kept while they are what the target chose. Where no token could be chosen behind
    them, a draft may be the cause: the step is done again, from now on without any. A lane that
    fails without drafts is reported as failed and ends.
    """
    depth = drafts.shape[1]
    offsets = torch.arange(depth + 1, device=lanes.device)
    running = counts.num_verify_rows > 0
    agrees = (
        (drafts == chosen[:, :-1]) & usable[:, :-1] & (offsets[:-1] < counts.num_drafts[:, None])
    )
    num_accepted = agrees.long().cumprod(1).sum(1)  # [B]
    broken = running & ~usable.gather(1, num_accepted[:, None])[:, 0]
    failed = broken & (counts.num_drafts == 0)
    num_new = torch.where(running & ~broken, num_accepted + 1, 0)

    last = chosen.gather(1, (num_new - 1).clamp(min=0)[:, None])[:, 0]
    state.last_tokens[lanes] = torch.where(num_new > 0, last, state.last_tokens[lanes])
    state.num_computed[lanes] = counts.num_computed + num_new
    state.limits[lanes] = torch.where(failed, 0, state.limits[lanes])
    state.wanted_drafts[lanes] = torch.where(broken, 0, state.wanted_drafts[lanes])
    if taps is not None:
        state.draft_starts[lanes] = counts.num_computed
        state.pending_tokens[lanes, : depth + 1] = chosen
        state.pending_taps[lanes, : depth + 1] = taps
    header = torch.stack((num_new, counts.num_drafts, failed.long()), dim=1)
    return torch.cat((header, chosen), dim=1)

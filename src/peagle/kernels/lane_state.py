"""What the device knows of the requests it decodes: one lane each.

A step reads and writes this state without asking the host, so the host may be a step behind.
The last lane is a dummy: it fills batches up to a graph's size and never produces anything.

Shapes: L lanes (dummy included), M blocks per request at most, P pending rows at most, C tapped
width, B lanes of a batch, K draft tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LaneState(NamedTuple):
    block_tables: Tensor  # [L, M] int32
    last_tokens: Tensor  # [L] the newest token; the target has not computed it
    num_computed: Tensor  # [L] tokens before it: its position
    limits: Tensor  # [L] the request ends with that many tokens, prompt included; 0: ended
    num_prompt: Tensor  # [L]
    wanted_drafts: Tensor  # [L] 0: this request is not speculated for
    # Rows the drafter has not run: positions draft_starts .. num_computed - 1.
    draft_starts: Tensor  # [L]
    pending_tokens: Tensor  # [L, P] the token at p + 1 for each
    pending_taps: Tensor  # [L, P, C] the target's hidden states at p
    # How the request is sampled; temperature 0 is greedy.
    temperature: Tensor  # [L] float32
    top_p: Tensor  # [L] float32
    min_p: Tensor  # [L] float32
    top_k: Tensor  # [L]
    seeds: Tensor  # [L]

    @property
    def dummy(self) -> int:
        return self.limits.shape[0] - 1


class StepCounts(NamedTuple):
    """Where each lane of a batch stands as a step begins; int64 [B] each but the last."""

    num_computed: Tensor
    draft_starts: Tensor
    num_pending: Tensor
    num_drafts: Tensor  # how many drafts are verified in this step
    num_draft_rows: Tensor  # pending rows and the mask rows behind them
    num_verify_rows: Tensor  # 0 where the request has ended
    num_outputs: Tensor  # tokens said so far: the output position of the next one
    last_tokens: Tensor
    pending_tokens: Tensor  # [B, K+1]


class RowPlan(NamedTuple):
    """The parts of PagedRows that depend on where the lanes stand; see kernels/rows.py."""

    tables: Tensor  # [B] int32
    starts: Tensor  # [B] int32
    ends: Tensor  # [B] int32
    positions: Tensor  # [B * Q] int64
    slots: Tensor  # [B * Q] int64


def make_lane_state(
    num_lanes: int, max_blocks: int, max_pending: int, tapped_width: int, taps_like: Tensor
) -> LaneState:
    """All lanes ended, the dummy among them."""
    device, size = taps_like.device, num_lanes + 1

    def integers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def floats(value: float) -> Tensor:
        return torch.full((size,), value, dtype=torch.float32, device=device)

    return LaneState(
        block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
        last_tokens=integers(size),
        num_computed=integers(size),
        limits=integers(size),
        num_prompt=integers(size),
        wanted_drafts=integers(size),
        draft_starts=integers(size),
        pending_tokens=integers(size, max_pending),
        pending_taps=taps_like.new_zeros(size, max_pending, tapped_width),
        temperature=floats(0.0),
        top_p=floats(1.0),
        min_p=floats(0.0),
        top_k=integers(size),
        seeds=integers(size),
    )

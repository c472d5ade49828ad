"""Rows brought to where a step reads them, as torch operations.

Shapes: B slots of the step, R rows of each, P of them real at most, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def expand_rows(
    real: Tensor,  # [B, P, H]
    num_real: Tensor,  # [B]
    mask: Tensor,  # [H]
    num_rows: int,
) -> Tensor:
    """The first `num_real` rows of each slot, then mask rows up to `num_rows`.  # [B * R, H]"""
    batch, given, size = real.shape
    rows = mask.expand(batch, num_rows, size).clone()
    width = min(given, num_rows)
    is_real = torch.arange(width, device=real.device) < num_real[:, None]  # [B, W]
    rows[:, :width] = torch.where(is_real[..., None], real[:, :width], mask)
    return rows.flatten(0, 1)


def embed_rows(
    table: Tensor,  # [V, H]
    token_ids: Tensor,  # [B, P]
    num_real: Tensor,  # [B]
    mask: Tensor,  # [H]
    num_rows: int,
) -> Tensor:
    """`expand_rows` of the tokens' embeddings.  # [B * R, H]"""
    return expand_rows(F.embedding(token_ids, table), num_real, mask, num_rows)


def embed_tokens(
    table: Tensor,  # [V, H]
    first: Tensor,  # [B]
    others: Tensor,  # [B, K]
    places: Tensor | None = None,  # [R] of these rows alone
) -> Tensor:
    """The embeddings of each slot's first token and of the others behind it.  # [B * (K+1), H]"""
    tokens = torch.cat((first[:, None], others), dim=1).flatten()
    return F.embedding(tokens if places is None else tokens[places], table)


def pick_rows(
    hidden: Tensor,  # [B * R, H]
    num_real: Tensor,  # [B]
    rows_per_slot: int,
    count: int,
) -> Tensor:
    """Of each slot's rows the last real one and those behind it, `count` in all; a slot that
    has none gives its first ones.  # [B * count, H]"""
    offsets = torch.arange(count, device=hidden.device)
    rows = ((num_real - 1).clamp(min=0)[:, None] + offsets).clamp(max=rows_per_slot - 1)
    firsts = torch.arange(num_real.shape[0], device=hidden.device) * rows_per_slot
    return hidden[(firsts[:, None] + rows).flatten()]

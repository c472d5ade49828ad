"""Rejection sampling in plain torch: the definition itself.

Shapes: B requests, K draft tokens at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.speculation.noise import ACCEPT_STREAM, RESIDUAL_STREAM, stream_uniform
from peagle.speculation.verify import PADDING, Verdict, verify_rejection

__all__ = ["PADDING", "Coins", "Verdict", "rejection_coins", "verify_rejection"]


class Coins(NamedTuple):
    """Uniforms in (0, 1), float64."""

    accept: Tensor  # [B, K]
    residual: Tensor  # [B, K+1]


def rejection_coins(seeds: Tensor, outputs: Tensor, depth: int) -> Coins:
    """The coins of K = `depth` drafts, the first of which is at output position `outputs` [B]."""
    positions = outputs[:, None] + torch.arange(depth + 1, device=outputs.device)  # [B, K+1]
    keys = seeds[:, None].expand_as(positions).flatten(), positions.flatten()
    accept = stream_uniform(*keys, ACCEPT_STREAM).view(positions.shape)
    return Coins(accept[:, :-1], stream_uniform(*keys, RESIDUAL_STREAM).view(positions.shape))

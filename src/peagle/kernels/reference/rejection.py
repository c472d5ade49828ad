"""Rejection sampling in torch: the definition itself.

Shapes: B requests, K draft tokens at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.speculation.noise import ACCEPT_STREAM, RESIDUAL_STREAM, stream_uniform
from peagle.speculation.verify import verify_rejection

__all__ = ["RejectionUniforms", "rejection_uniforms", "verify_rejection"]


class RejectionUniforms(NamedTuple):
    """Uniforms in (0, 1), float64."""

    accept: Tensor  # [B, K]
    residual: Tensor  # [B, K+1]


def rejection_uniforms(seeds: Tensor, outputs: Tensor, depth: int) -> RejectionUniforms:
    """The uniforms of K = `depth` drafts; the first draft is at output position `outputs` [B]."""
    positions = outputs[:, None] + torch.arange(depth + 1, device=outputs.device)  # [B, K+1]
    keys = seeds[:, None].expand_as(positions).flatten(), positions.flatten()
    accept = stream_uniform(*keys, ACCEPT_STREAM).view(positions.shape)
    return RejectionUniforms(
        accept[:, :-1], stream_uniform(*keys, RESIDUAL_STREAM).view(positions.shape)
    )

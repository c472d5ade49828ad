"""The attention seam. Modules project and rotate; an Attention object knows who sees whom.

That is what lets one module serve both sides: the engine passes an object that reads and writes
a paged cache, training passes one that holds a mask over the rows at hand.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.cpu.layers import CachePlace


class Attention(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D], rotated -> [N, heads, D].

        `layer` counts the layers of the model that calls; `window` is its sliding window.
        """
        ...


class CachedAttention:
    """An Attention over a cache in memory, which a kernel may read and write by itself."""

    def kernel_place(self, heads: int) -> CachePlace | None:
        """None where the rows are better off with `__call__`."""
        raise NotImplementedError


class MaskedAttention:
    """Attention among the given rows alone, under a boolean mask [N, N]: True may be seen."""

    def __init__(self, mask: Tensor, positions: Tensor) -> None:
        self.mask = mask
        self.distance = positions[:, None] - positions[None, :]  # [N, N]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        mask = self.mask if window is None else self.mask & (self.distance < window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, N, D]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)


def causal_attention(positions: Tensor) -> MaskedAttention:
    """Plain causal attention over one document's rows: for parity tests and offline passes."""
    n = positions.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
    return MaskedAttention(mask, positions)

"""Attention for static rows over a paged cache: everything it needs lies on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.cpu.layers import CachePlace
from peagle.kernels.reference.attention import paged_attention
from peagle.kernels.rows import RowGroups
from peagle.models.attention import CachedAttention


class RowsAttention(CachedAttention):
    """The reference, for any device. On a GPU `FusedLayers` runs whole layers over the same
    rows and caches with Triton kernels instead."""

    def __init__(self, rows: RowGroups, keys: Tensor, values: Tensor) -> None:
        self.rows = rows
        self.keys = keys  # [L, S, g, D]
        self.values = values  # [L, S, g, D]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(0, self.rows.slots, k.to(keys.dtype))
        values.index_copy_(0, self.rows.slots, v.to(values.dtype))
        parts = zip(self.rows.parts(q), self.rows.groups, strict=True)
        return torch.cat([paged_attention(x, keys, values, group, window) for x, group in parts])

    def kernel_place(self, heads: int) -> CachePlace | None:
        """The CPU kernel reads blocks from the host; these are on the device."""
        return None

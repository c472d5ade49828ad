"""The attention seam. Modules project and rotate; an Attention object knows who sees whom.

That is what lets one module serve both sides: the engine passes an object that reads and writes
a paged cache, training passes one that holds a mask over the rows at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.cpu.layers import CachePlace
from peagle.kernels.policy import gpu_takes
from peagle.kernels.reference.attention import PLAIN, Scores, attend, paged_attention
from peagle.kernels.rows import PagedRows, RowGroups


class Attention(Protocol):
    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D], rotated -> [N, heads, D].

        `layer` counts the layers of the model that calls; `window` is its sliding window.
        """
        ...


def layer_cache(cache: Tensor, rows: Tensor) -> Tensor:
    """A layer's cache [S, g, D] for rows [N, g', D'] that may be narrower: [S, g', D']."""
    kv_heads, dim = rows.shape[-2:]
    if cache.shape[-2:] == (kv_heads, dim):
        return cache
    return cache.flatten(-2)[:, : kv_heads * dim].view(-1, kv_heads, dim)


class CachedAttention:
    """An Attention over a cache in memory, which a kernel may read and write by itself."""

    def kernel_place(self, heads: int) -> CachePlace | None:
        """None where the rows are better off with `__call__`."""
        raise NotImplementedError

    def prefixes(self, x: Tensor) -> list[tuple[Tensor, int]]:
        """Keeps rows x [N, H] in the place of keys; -> each sequence up to its last row [T, H], and
        how many of its rows are these. For targets that compute every prefix again."""
        raise NotImplementedError


class RowsAttention(CachedAttention):
    """For rows of fixed shapes over a paged cache, whose places lie on the device, as under CUDA
    graphs: on a GPU by the Triton kernel, elsewhere by its reference. `FusedLayers` runs whole
    layers over the same rows and caches with Triton kernels, where it knows them.

    Everything by layer: those that keep other positions have other block tables.
    """

    def __init__(
        self,
        rows: Sequence[RowGroups],
        keys: Sequence[Tensor],  # [S, g, D] each
        values: Sequence[Tensor],
    ) -> None:
        self.rows, self.keys, self.values = rows, keys, values

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        keys, values = layer_cache(self.keys[layer], k), layer_cache(self.values[layer], v)
        rows = self.rows[layer]
        keys.index_copy_(0, rows.slots, k.to(keys.dtype))
        values.index_copy_(0, rows.slots, v.to(values.dtype))
        parts = zip(rows.parts(q), rows.groups, strict=True)
        return torch.cat([_paged(x, keys, values, group, window, scores) for x, group in parts])

    def kernel_place(self, heads: int) -> CachePlace | None:
        """The CPU kernel reads blocks from the host; these are on the device."""
        return None


def _paged(
    q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, window: int | None, scores: Scores
) -> Tensor:
    if not gpu_takes(q):
        return paged_attention(q, keys, values, rows, window, scores)
    from peagle.kernels.gpu import attention as gpu

    return gpu.paged_attention(q.contiguous(), keys, values, rows, window, scores=scores)


class MaskedAttention:
    """Attention among the given rows alone, under a boolean mask [N, N]: True may be seen."""

    def __init__(self, mask: Tensor, positions: Tensor) -> None:
        self.mask = mask
        self.distance = positions[:, None] - positions[None, :]  # [N, N]

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        mask = self.visible(window)
        if not scores.is_softmax:
            return attend(q, k, v, mask, scores)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, N, D]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scores.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def visible(self, window: int | None) -> Tensor:
        """[N, N]"""
        return self.mask if window is None else self.mask & (self.distance < window)


def causal_attention(positions: Tensor) -> MaskedAttention:
    """Causal attention over one document's rows: for parity tests and offline passes."""
    n = positions.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril()
    return MaskedAttention(mask, positions)

"""The heads that a projection gives: norm, rotation and the write into the paged cache, in torch.

Shapes: N rows, I inputs, S slots, h heads, g key-value heads, D head dimension, P rotary positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.reference.linear import Norm, at_least_float32, fused_linear
from peagle.kernels.rows import PagedRows, RowGroups


def rotate_and_write(
    qkv: Tensor,  # [N, (h + 2g) * D]
    rows: PagedRows | RowGroups,
    cos: Tensor,  # [P, D] float32
    sin: Tensor,  # [P, D] float32, its first half negated
    q_norm: Tensor | None,  # [D]
    k_norm: Tensor | None,  # [D]
    eps: float,
    keys: Tensor,  # [S, g, D]
    values: Tensor,  # [S, g, D]
) -> Tensor:
    """Writes each row's key and value to its slot; -> the rotated queries [N, h, D]."""
    kv_heads, dim = keys.shape[-2:]
    all_heads = qkv.view(len(qkv), qkv.shape[1] // dim, dim)
    heads = all_heads.shape[1] - 2 * kv_heads
    q, k, v = torch.split(all_heads, [heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos[rows.positions].unsqueeze(1), sin[rows.positions].unsqueeze(1)  # [N, 1, D]
    keys[rows.slots] = _rotate(_norm(k, k_norm, eps), cos, sin)
    values[rows.slots] = v
    return _rotate(_norm(q, q_norm, eps), cos, sin).contiguous()


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return x
    normed = F.rms_norm(at_least_float32(x), weight.shape, None, eps)
    return normed.to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    wide = at_least_float32(x)
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * cos + swapped * signed_sin).to(x.dtype)


def qkv_to_cache(
    x: Tensor,  # [N, I]
    weight: Tensor,  # [(h + 2g) * D, I]
    bias: Tensor | None,  # [(h + 2g) * D]
    *,
    norm: Norm | None,  # of x, before the product
    rows: PagedRows | RowGroups,
    cos: Tensor,  # [P, D] float32, both halves the same
    sin: Tensor,  # [P, D] float32, the first half the negated second
    keys: Tensor,  # [S, g, D]
    values: Tensor,  # [S, g, D]
) -> Tensor:
    """Writes each row's key and value to its slot; -> the rotated queries [N, h, D]."""
    qkv = fused_linear(x, weight, bias, norm=norm, residual=None)
    # The epsilon is of the heads' norms, which there are none of.
    return rotate_and_write(qkv, rows, cos, sin, None, None, 0.0, keys, values)

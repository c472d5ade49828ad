"""Queries, keys and values of few rows, with rotation and cache write, in plain torch.

Shapes: N rows, I inputs, S slots, h heads, g key-value heads, D head dimension, P positions.
"""

from __future__ import annotations

from torch import Tensor

from peagle.kernels.reference.attention import rotate_and_write
from peagle.kernels.reference.linear import Norm, fused_linear
from peagle.kernels.rows import PagedRows, RowGroups


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

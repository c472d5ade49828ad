"""Sums of rows in one order, whatever threads hold them: by construction, not by layout.

`tl.sum` adds within threads first, so its order follows the tile and the number of warps. These are
pairs of neighbours, pairs of pairs and so on.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pairs(values, SIZE: tl.constexpr):
    """[R, SIZE] -> [R, SIZE / 2]"""
    first, second = tl.split(tl.reshape(values, (values.shape[0], SIZE // 2, 2)))
    return first + second


@triton.jit
def row_sums(values, SIZE: tl.constexpr):
    """[R, SIZE] -> [R]; SIZE is a power of two up to 256."""
    tl.static_assert(SIZE <= 256)
    if SIZE >= 256:
        values = _pairs(values, 256)
    if SIZE >= 128:
        values = _pairs(values, 128)
    if SIZE >= 64:
        values = _pairs(values, 64)
    if SIZE >= 32:
        values = _pairs(values, 32)
    if SIZE >= 16:
        values = _pairs(values, 16)
    if SIZE >= 8:
        values = _pairs(values, 8)
    if SIZE >= 4:
        values = _pairs(values, 4)
    if SIZE >= 2:
        values = _pairs(values, 2)
    return tl.reshape(values, (values.shape[0],))

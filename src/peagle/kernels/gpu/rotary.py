"""Norm, rotation and cache write of the heads that a projection gives, in one launch.

Shapes: N rows, S slots, h heads, g key-value heads, D head dimension, P rotary positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.gpu.sums import row_sums
from peagle.kernels.gpu.tiles import power_of_two
from peagle.kernels.rows import PagedRows, RowGroups

# Few rows: many small programs, to fill the GPU. Many rows: a program for each, since starting
# thousands of them takes longer than their work.
FEW_ROWS = 64
HEADS_PER_PROGRAM = 4
MAX_HEADS_PER_PROGRAM = 16


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
    heads = qkv.shape[1] // dim - 2 * kv_heads
    assert qkv.shape[1] == (heads + 2 * kv_heads) * dim
    assert dim % 2 == 0
    assert (q_norm is None) == (k_norm is None)
    assert cos.dtype == sin.dtype == torch.float32
    assert qkv.dtype == keys.dtype == values.dtype
    assert all(t.is_contiguous() for t in (qkv, cos, sin, keys, values))
    q = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    block_heads = HEADS_PER_PROGRAM
    if qkv.shape[0] > FEW_ROWS:
        block_heads = min(power_of_two(heads + 2 * kv_heads), MAX_HEADS_PER_PROGRAM)
    grid = (qkv.shape[0], triton.cdiv(heads + 2 * kv_heads, block_heads))
    if qkv.shape[0]:
        _rotate_and_write[grid](
            qkv,
            rows.positions,
            rows.slots,
            cos,
            sin,
            cos if q_norm is None else q_norm,
            cos if k_norm is None else k_norm,
            q,
            keys,
            values,
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HAS_NORM=q_norm is not None,
            BLOCK_H=block_heads,
            BLOCK_C=power_of_two(dim // 2),
            num_warps=max(block_heads // HEADS_PER_PROGRAM, 1),
            **overlapping(),
        )
    return q


@triton.jit
def rotate(x, cos, y, sin):
    """x * cos + y * sin. A compiler may join either product with the sum: here it is the first, in
    every kernel."""
    return tl.fma(x, cos, y * sin)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rotate_and_write(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2: a head is two halves, whose elements are rotated in pairs
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # 1. Which row, heads and columns of a half; its place, written long before, and its angles.
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # [BLOCK_H, 1]
    column = tl.arange(0, BLOCK_C)[None, :]  # [1, BLOCK_C]
    there = (head < HEADS + 2 * KV_HEADS) & (column < HALF)
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = head >= HEADS + KV_HEADS
    angles = tl.load(positions_ptr + row).to(tl.int64) * (2 * HALF) + column
    cos_x = tl.load(cos_ptr + angles, mask=column < HALF, other=0.0)
    cos_y = tl.load(cos_ptr + angles + HALF, mask=column < HALF, other=0.0)
    sin_x = tl.load(sin_ptr + angles, mask=column < HALF, other=0.0)
    sin_y = tl.load(sin_ptr + angles + HALF, mask=column < HALF, other=0.0)
    slot = tl.load(slots_ptr + row).to(tl.int64) * (KV_HEADS * 2 * HALF) + column
    if OVERLAPS:
        wait()
    source = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * (2 * HALF) + column
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)

    # 2. Norm of queries and keys, each with its weight, rounded before the weight and after it.
    dtype = qkv_ptr.dtype.element_ty
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(row_sums(x * x + y * y, BLOCK_C)[:, None] / (2 * HALF) + eps)
        in_half = column < HALF
        q_x = tl.load(q_norm_ptr + column, mask=in_half, other=0.0)
        q_y = tl.load(q_norm_ptr + column + HALF, mask=in_half, other=0.0)
        k_x = tl.load(k_norm_ptr + column, mask=in_half, other=0.0)
        k_y = tl.load(k_norm_ptr + column + HALF, mask=in_half, other=0.0)
        x_weight = tl.where(is_query, q_x, k_x).to(tl.float32)
        y_weight = tl.where(is_query, q_y, k_y).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)

    # 3. Rotation; the sign of the first half is in its sine.
    rotated_x = rotate(x, cos_x, y, sin_x).to(dtype)
    rotated_y = rotate(y, cos_y, x, sin_y).to(dtype)

    # 4. Each kind of head to its place.
    query = q_ptr + row * (HEADS * 2 * HALF) + head * (2 * HALF) + column
    tl.store(query, rotated_x, mask=there & is_query)
    tl.store(query + HALF, rotated_y, mask=there & is_query)
    key = keys_ptr + slot + (head - HEADS) * (2 * HALF)
    tl.store(key, rotated_x, mask=there & is_key)
    tl.store(key + HALF, rotated_y, mask=there & is_key)
    value = values_ptr + slot + (head - HEADS - KV_HEADS) * (2 * HALF)
    tl.store(value, first, mask=there & is_value)
    tl.store(value + HALF, second, mask=there & is_value)

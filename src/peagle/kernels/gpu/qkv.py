"""The heads that a projection gives: norm, rotation and the write into the paged cache.

`rotate_and_write` does it in one launch behind a product. `qkv_to_cache` is `fused_linear` with
`rotate_and_write` behind it in a single launch, for few rows, up to a few last bits. Its programs
compute whole pairs of one head that are rotated together: pair p is elements p and p + D / 2, side
by side in a tile.

Shapes: N rows, I inputs, S slots, h heads, g key-value heads, D head dimension, P rotary positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.linear import scale_and_add, sum_products, tile_for
from peagle.kernels.gpu.norms import norm_scale, row_sums
from peagle.kernels.gpu.overlap import fetch_rows, overlapping, wait
from peagle.kernels.layer_tensors import LayerTensors
from peagle.kernels.policy import FAST, Policy
from peagle.kernels.reference.linear import Norm
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
    assert all(t.is_contiguous() for t in (qkv, cos, sin))
    _check_cache(keys, values)
    q = torch.empty(qkv.shape[0], heads, dim, dtype=qkv.dtype, device=qkv.device)
    block_heads = HEADS_PER_PROGRAM
    if qkv.shape[0] > FEW_ROWS:
        block_heads = min(triton.next_power_of_2(heads + 2 * kv_heads), MAX_HEADS_PER_PROGRAM)
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
            SLOT=keys.stride(0),
            HALF=dim // 2,
            HAS_NORM=q_norm is not None,
            BLOCK_H=block_heads,
            BLOCK_C=triton.next_power_of_2(dim // 2),
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
    SLOT: tl.constexpr,  # values from one slot to the next
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
    slot = tl.load(slots_ptr + row).to(tl.int64) * SLOT + column
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


def fits_one_kernel(layer: LayerTensors, x: Tensor, head_dim: int, policy: Policy = FAST) -> bool:
    """Whether `qkv_to_cache` takes the layer; else `fused_linear`, then `rotate_and_write`.

    A program has a part of one head: not enough for a head's norm, and not of two heads.
    """
    if len(x) > policy.max_turned_rows or layer.q_norm is not None or layer.k_norm is not None:
        return False
    return head_dim % tile_for(policy, x, layer.qkv.weight).outputs == 0


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
    policy: Policy = FAST,
) -> Tensor:
    """Writes each row's key and value to its slot; -> the rotated queries [N, h, D].

    rows, cos and sin are read early (overlap.py): the launch right before must not write them.
    """
    (num_rows, inputs), (kv_heads, dim) = x.shape, keys.shape[-2:]
    heads = weight.shape[0] // dim - 2 * kv_heads
    q = torch.empty(num_rows, heads, dim, dtype=x.dtype, device=x.device)
    _check(x, weight, bias, norm, q, cos, sin, keys, values)
    if num_rows == 0:
        return q
    block = tile_for(policy, x, weight)  # as in `fused_linear`: so the sums have the same order
    assert dim % block.outputs == 0
    grid = (weight.shape[0] // block.outputs, triton.cdiv(num_rows, block.rows))
    _qkv_to_cache[grid](
        x,
        weight,
        # A pointer that is not read must still be one: x stands in.
        x if bias is None else bias,
        x if norm is None else norm.weight,
        rows.positions,
        rows.slots,
        cos,
        sin,
        q,
        keys,
        values,
        num_rows,
        x.stride(0),
        weight.stride(0),
        0.0 if norm is None else norm.eps,
        INPUTS=inputs,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SLOT=keys.stride(0),
        HALF=dim // 2,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        BLOCK_ROWS=block.rows,
        BLOCK_OUTPUTS=block.outputs,
        BLOCK_INPUTS=block.inputs,
        SUMS=block.sums,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlapping(),
    )
    return q


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Our own mistakes: the kernel would read or write beyond the end, or something else."""
    inputs, outputs, (kv_heads, dim) = x.shape[1], weight.shape[0], keys.shape[-2:]
    assert weight.shape[1] == inputs
    assert outputs == (q.shape[1] + 2 * kv_heads) * dim
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous())
    assert norm is None or (norm.weight.shape == (inputs,) and norm.weight.is_contiguous())
    assert cos.shape[1] == sin.shape[1] == dim
    assert cos.dtype == sin.dtype == torch.float32
    assert x.dtype == weight.dtype == keys.dtype == values.dtype
    assert all(t.is_contiguous() for t in (cos, sin))
    _check_cache(keys, values)


def _check_cache(keys: Tensor, values: Tensor) -> None:
    """Heads lie side by side; a slot's may be the beginning of a wider row."""
    assert keys.stride() == values.stride() == (keys.stride(0), keys.shape[-1], 1)


# One compiled form for every number of rows, so that all have the same order of sums.
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"]
)
def _qkv_to_cache(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    num_rows,
    x_stride,
    weight_stride,
    eps,
    INPUTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SLOT: tl.constexpr,  # values from one slot to the next
    HALF: tl.constexpr,  # D / 2
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,  # two for each pair
    BLOCK_INPUTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # 1. Which rows, which head, which of its elements: both of a pair are neighbours.
    PAIRS: tl.constexpr = BLOCK_OUTPUTS // 2
    DIM: tl.constexpr = 2 * HALF
    head = tl.program_id(0) // (HALF // PAIRS)
    column = tl.arange(0, BLOCK_OUTPUTS)
    is_second = column % 2
    pair = tl.program_id(0) % (HALF // PAIRS) * PAIRS + column // 2
    elements = pair + is_second * HALF
    outputs = head * DIM + elements
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_there = rows < num_rows
    there = row_there[:, None]
    rows = rows.to(tl.int64)
    x_rows = x_ptr + rows[:, None] * x_stride
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * weight_stride
    dtype = x_ptr.dtype.element_ty

    # 2. Where rows go and how they turn: known since before the kernel ahead. An angle's cosine
    # and sine lie as a pair does, so that after the product no thread needs what another one has.
    if OVERLAPS:
        fetch_rows(weight_rows, INPUTS)
    slot = tl.load(slots_ptr + rows, mask=row_there, other=0).to(tl.int64)
    position = tl.load(positions_ptr + rows, mask=row_there, other=0).to(tl.int64)
    angles = position[:, None] * DIM + pair[None, :]
    tables = tl.where(is_second[None, :] == 0, cos_ptr + angles, sin_ptr + HALF + angles)
    turn = tl.load(tables, mask=there, other=0.0)
    cos, sin = tl.split(tl.reshape(turn, (BLOCK_ROWS, PAIRS, 2)))

    # 3. The product.
    if OVERLAPS:
        wait()
    total, _, squares = sum_products(
        x_rows, weight_rows, weight_rows, norm_ptr, there, elements < DIM, INPUTS, HAS_NORM, False,
        BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, SUMS,
    )  # fmt: skip
    scale = squares  # in place of none
    if HAS_NORM:
        scale = norm_scale(squares, eps, INPUTS, BLOCK_INPUTS)[:, None]
    total = scale_and_add(total, scale, bias_ptr + outputs, elements < DIM, HAS_NORM, HAS_BIAS)

    # 4. Rotation of queries and keys, of sums that are rounded already.
    first, second = tl.split(tl.reshape(total.to(dtype), (BLOCK_ROWS, PAIRS, 2)))
    if head < HEADS + KV_HEADS:
        x, y = first.to(tl.float32), second.to(tl.float32)
        first = rotate(x, cos, y, -sin).to(dtype)
        second = rotate(y, cos, x, sin).to(dtype)
    result = tl.reshape(tl.join(first, second), (BLOCK_ROWS, BLOCK_OUTPUTS))

    # 5. Each kind of head to its place.
    if head < HEADS:
        places = (rows * HEADS + head)[:, None] * DIM + elements[None, :]
        tl.store(q_ptr + places, result, mask=there)
    elif head < HEADS + KV_HEADS:
        places = (slot * SLOT + (head - HEADS) * DIM)[:, None] + elements[None, :]
        tl.store(keys_ptr + places, result, mask=there)
    else:
        places = (slot * SLOT + (head - HEADS - KV_HEADS) * DIM)[:, None] + elements[None, :]
        tl.store(values_ptr + places, result, mask=there)

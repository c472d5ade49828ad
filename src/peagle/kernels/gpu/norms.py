"""What stands between two products of many rows: norms, with a residual or without, and gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait

MAX_COLUMNS = 4096  # of a row that a program holds at once; longer rows are read in parts
PARTS_AT_ONCE = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, H] times weight [H]. Half precision is rounded before the weight, as RMSNorm does."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run_norm(x, None, weight, eps, normed, normed)
    return normed


def norm_pair(
    first: Tensor,  # [M, H]
    second: Tensor,  # [M, H]
    first_weight: Tensor,  # [H]
    second_weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """The norms of both, side by side: [M, 2H]."""
    rows, columns = first.shape
    assert first.stride(1) == second.stride(1) == 1
    out = torch.empty(rows, 2 * columns, dtype=first.dtype, device=first.device)
    if rows:
        _norm_pair[(rows, 2)](
            first,
            second,
            first_weight,
            second_weight,
            out,
            first.stride(0),
            second.stride(0),
            eps,
            COLUMNS=columns,
            BLOCK=triton.next_power_of_2(columns),
            num_warps=4,
            **overlapping(),
        )
    return out


def weigh_rows(x: Tensor, weight: Tensor, eps: float, part: int) -> tuple[Tensor, Tensor]:
    """-> x times the norm's weight [M, H], and each row's scale [M] float32, for a product to apply
    to its sums: bit for bit what a product does by itself that reads `part` inputs in a turn."""
    rows, columns = x.shape
    assert x.stride(1) == 1
    assert weight.shape == (columns,)
    assert weight.is_contiguous()
    weighed = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _weigh_rows[(rows,)](
            x,
            weight,
            weighed,
            scales,
            x.stride(0),
            eps,
            COLUMNS=columns,
            PART=part,
            AT_ONCE=PARTS_AT_ONCE,
            BLOCK=min(triton.next_power_of_2(columns), 1024),
            num_warps=1,
            **overlapping(),
        )
    return weighed, scales


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> the norm of x + residual [M, H], and the sum itself."""
    normed, summed = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind()
    _run_norm(x, residual, weight, eps, normed, summed)
    return normed, summed


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [M, 2I] -> [M, I]."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(triton.next_power_of_2(columns), 1024)
        grid = (rows, triton.cdiv(columns, block))
        _silu_mul[grid](
            gate_up,
            out,
            gate_up.stride(0),
            columns,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _run_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, summed: Tensor
) -> None:
    rows, columns = x.shape
    assert x.stride(1) == 1
    assert weight.shape == (columns,)
    assert weight.is_contiguous()
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    if rows == 0:
        return
    block = min(triton.next_power_of_2(columns), MAX_COLUMNS)
    _rms_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        normed,
        summed,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        COLUMNS=columns,
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        **overlapping(),
    )


@triton.jit
def _pairs(values, SIZE: tl.constexpr):
    """[R, SIZE] -> [R, SIZE / 2]"""
    first, second = tl.split(tl.reshape(values, (values.shape[0], SIZE // 2, 2)))
    return first + second


@triton.jit
def row_sums(values, SIZE: tl.constexpr):
    """[R, SIZE] -> [R]; SIZE is a power of two up to 256.

    In one order, whatever threads hold the row: pairs of neighbours, pairs of pairs and so on.
    `tl.sum` adds within threads first, so its order follows the tile and the number of warps.
    """
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


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    summed_ptr,
    x_stride,
    residual_stride,
    eps,
    COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    x_row, residual_row = x_ptr + row * x_stride, residual_ptr + row * residual_stride
    dtype = x_ptr.dtype.element_ty
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < COLUMNS
        part = tl.load(x_row + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            part += tl.load(residual_row + columns, mask=there, other=0.0).to(tl.float32)
            rounded = part.to(dtype)
            tl.store(summed_ptr + row * COLUMNS + columns, rounded, mask=there)
            part = rounded.to(tl.float32)
        squares += part * part
    scale = tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < COLUMNS
        part = tl.load(x_row + columns, mask=there, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:  # summed again: other threads may not see yet what was stored above
            part += tl.load(residual_row + columns, mask=there, other=0.0).to(tl.float32)
            part = part.to(dtype).to(tl.float32)
        normed = (part * scale).to(dtype).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=there, other=0.0).to(tl.float32)
        tl.store(normed_ptr + row * COLUMNS + columns, (normed * weight).to(dtype), mask=there)


@triton.jit
def norm_scale(squares, eps, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Of rows whose squares are added up in PART places: [R, PART] -> [R]"""
    return tl.rsqrt(row_sums(squares, PART) / COLUMNS + eps)


@triton.jit
def _weigh_rows(
    x_ptr,
    weight_ptr,
    weighed_ptr,
    scales_ptr,
    x_stride,
    eps,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts whose loads are in flight together
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    squares = tl.zeros((1, PART), dtype=tl.float32)
    for start in range(0, COLUMNS, PART * AT_ONCE):
        for part in tl.static_range(AT_ONCE):
            columns = start + part * PART + tl.arange(0, PART)[None, :]
            x = tl.load(x_row + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
            squares += x * x
    scale = norm_scale(squares, eps, COLUMNS, PART)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    for start in range(0, COLUMNS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        there = columns < COLUMNS
        x = tl.load(x_row + columns, mask=there, other=0.0)
        weight = tl.load(weight_ptr + columns, mask=there, other=0.0)
        weighed = (x.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)
        tl.store(weighed_ptr + row * COLUMNS + columns, weighed, mask=there)


@triton.jit
def _norm_pair(
    first_ptr,
    second_ptr,
    first_weight_ptr,
    second_weight_ptr,
    out_ptr,
    first_stride,
    second_stride,
    eps,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        wait()
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    there = columns < COLUMNS
    dtype = out_ptr.dtype.element_ty
    if half == 0:
        x = tl.load(first_ptr + row * first_stride + columns, mask=there, other=0.0)
        weight = tl.load(first_weight_ptr + columns, mask=there, other=0.0)
    else:
        x = tl.load(second_ptr + row * second_stride + columns, mask=there, other=0.0)
        weight = tl.load(second_weight_ptr + columns, mask=there, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    place = out_ptr + (2 * row + half) * COLUMNS + columns
    tl.store(place, (normed * weight.to(tl.float32)).to(dtype), mask=there)


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, stride, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < num_columns
    gates = gate_up_ptr + row * stride + columns
    gate = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gates + num_columns, mask=there, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * num_columns + columns, out.to(out_ptr.dtype.element_ty), mask=there)

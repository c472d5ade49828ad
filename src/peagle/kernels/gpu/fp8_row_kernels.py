"""The kernels of fp8_rows.py. Each program has one row, of which BLOCK >= COLUMNS are held."""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait


@triton.jit
def quantize_normed_row(
    parts,
    bias,
    residual,
    norm_weight,
    summed,
    out,
    scales,
    split_stride,
    row_stride,
    residual_stride,
    summed_stride,
    eps,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STORES_SUM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < COLUMNS
    dtype = summed.dtype.element_ty
    if HAS_NORM:  # nobody writes it: it may be on its way while the sums are still made
        weight = tl.load(norm_weight + columns, mask=there, other=0.0).to(tl.float32)
    if OVERLAPS:
        gdc_wait()
    values = _whole(
        parts + row * row_stride, bias, columns, there, split_stride, dtype, SPLITS, HAS_BIAS
    )
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + columns, mask=there, other=0.0).to(
            tl.float32
        )
        values = values.to(dtype).to(tl.float32)
    if STORES_SUM:
        tl.store(summed + row * summed_stride + columns, values.to(dtype), mask=there)
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(values * values, axis=0) / COLUMNS + eps)
        values = ((values * root).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    _store_quantized(values, out, scales, row, columns, COLUMNS, LARGEST, SMALLEST_SCALE, OVERLAPS)


@triton.jit
def quantize_gated_row(
    gate_up,
    out,
    scales,
    row_stride,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < COLUMNS
    gates = gate_up + row * row_stride + columns
    if OVERLAPS:
        gdc_wait()
    gate = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gates + COLUMNS, mask=there, other=0.0).to(tl.float32)
    values = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    _store_quantized(values, out, scales, row, columns, COLUMNS, LARGEST, SMALLEST_SCALE, OVERLAPS)


@triton.jit
def finish_row(
    parts,
    bias,
    residual,
    out,
    split_stride,
    row_stride,
    residual_stride,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < COLUMNS
    dtype = out.dtype.element_ty
    if OVERLAPS:
        gdc_wait()
    values = _whole(
        parts + row * row_stride, bias, columns, there, split_stride, dtype, SPLITS, HAS_BIAS
    )
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + columns, mask=there, other=0.0).to(
            tl.float32
        )
    if OVERLAPS:
        gdc_launch_dependents()
    tl.store(out + row * COLUMNS + columns, values.to(dtype), mask=there)


@triton.jit
def _whole(
    row,
    bias,
    columns,
    there,
    split_stride,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The sum of a row's parts, in their order, with its bias: float32, rounded as DTYPE is."""
    total = tl.load(row + columns, mask=there, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        part = row + tl.cast(split, tl.int64) * split_stride
        total += tl.load(part + columns, mask=there, other=0.0).to(tl.float32)
    total = total.to(DTYPE).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
        total = total.to(DTYPE).to(tl.float32)
    return total


@triton.jit
def _store_quantized(
    values,
    out,
    scales,
    row,
    columns,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # div_rn is the plain twin's division; a GPU's `/` is a little off
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE)
    # No number exceeds LARGEST, and NaN stays NaN: nothing is clamped.
    rounded = _as_fp8(tl.div_rn(values, scale))
    if OVERLAPS:
        gdc_launch_dependents()
    tl.store(scales + row, scale)
    place = out + row * COLUMNS + columns
    tl.store(place, rounded.to(out.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _as_fp8(x):
    """x, at most LARGEST, rounded to the nearest FP8 number, ties to even.

    By arithmetic and not by a cast: FP8 keeps three bits behind the leading one, so a number
    2**20 times as large, added and taken away, leaves what is to be kept. Below 2**-6 steps are
    2**-9. Triton's interpreter casts otherwise than a GPU does.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = 1572864.0 * tl.maximum(power, 0.015625)  # 1.5 * 2**20
    return (x + large) - large

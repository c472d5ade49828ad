"""Products of few rows with a layer's weights, with the operations around them in one kernel.

Decoding a small model on a GPU is bound by the number of kernels, not by their work: so the norm
before a product, and the bias, gate and residual behind it, are part of it. The norm's scale, one
number per row, is applied to the sums: so its squares are summed in the same loop as the product,
which otherwise would have to wait for them. A tensor core's products that add to the same sum wait
for each other: so a tile may be summed in two or four parts. For many rows, and for large weights,
cuBLAS has the better product; norms.py holds what then stands between two of them.

Shapes: M rows, K inputs, N outputs. A row's sums have one order, decided by `tile`, which is the
same for every M <= 16: a row has the same bits alone or beside others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.norms import add_rms_norm, rms_norm, silu_mul
from peagle.kernels.gpu.overlap import fetch_rows, overlapping, wait
from peagle.kernels.plain.linear import MAX_FUSED_ROWS, Norm

__all__ = [
    "MAX_FUSED_ROWS",
    "Norm",
    "Tile",
    "add_rms_norm",
    "fused_linear",
    "rms_norm",
    "silu_mul",
    "sum_products",
    "tile",
]


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int  # gated: so many gates and as many ups
    inputs: int  # of one turn of the loop
    warps: int
    stages: int
    sums: int = 1  # side by side, each takes every `sums`-th turn: 1, 2 or 4


def tile(rows: int, outputs: int, inputs: int, gated: bool, itemsize: int) -> Tile:
    """For a product [rows, inputs] x [outputs, inputs]; `outputs` counts gates and ups alike.

    Of some 40 forms on an H200 the best for SmolLM2's products inside its layers, or near it:
    narrow tiles, so that there is a program for every multiprocessor, and many turns in flight.
    """
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if itemsize > 2:  # no tensor cores: the operands must fit the registers
        return Tile(block_rows, 16, 32, warps=4, stages=2)
    narrow, long = outputs <= 640, inputs >= 1024
    if rows > 64:
        return Tile(64, 32 if gated else 16, 64, warps=4, stages=4, sums=2 if long else 1)
    kind = "gated" if gated else "wide" if not narrow else "long" if long else "short"
    return _TILES[block_rows, kind]


_TILES = {
    (16, "gated"): Tile(16, 16, 32, warps=2, stages=4, sums=4),
    (16, "wide"): Tile(16, 16, 32, warps=2, stages=4, sums=2),
    (16, "long"): Tile(16, 16, 128, warps=4, stages=4),
    (16, "short"): Tile(16, 16, 64, warps=2, stages=8),
    (32, "gated"): Tile(32, 16, 64, warps=2, stages=4, sums=2),
    (32, "wide"): Tile(32, 16, 64, warps=4, stages=8),
    (32, "long"): Tile(32, 16, 128, warps=2, stages=4, sums=2),
    (32, "short"): Tile(32, 16, 64, warps=2, stages=4),
    (64, "gated"): Tile(64, 16, 128, warps=4, stages=6),
    (64, "wide"): Tile(64, 16, 64, warps=4, stages=8),
    (64, "long"): Tile(64, 16, 64, warps=4, stages=4, sums=2),
    (64, "short"): Tile(64, 16, 128, warps=4, stages=4),
}


def fused_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]; gated: the first N / 2 rows are the gate, the rest up
    bias: Tensor | None,  # [N]
    *,
    norm: Norm | None,  # of x, before the product
    residual: Tensor | None,  # [M, N], or [M, N / 2] when gated: added before the one rounding
    gated: bool = False,
    out_dtype: torch.dtype | None = None,  # None: that of x
) -> Tensor:
    """-> [M, N], or silu(gate) * up [M, N / 2]."""
    rows, inputs = x.shape
    results = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, results, dtype=out_dtype or x.dtype, device=x.device)
    _check(x, weight, bias, norm, residual, out)
    if rows == 0:
        return out
    block = tile(rows, weight.shape[0], inputs, gated, weight.dtype.itemsize)
    grid = (triton.cdiv(results, block.outputs), triton.cdiv(rows, block.rows))
    _fused_linear[grid](
        x,
        weight,
        # A pointer that is not read must still be one: x stands in.
        x if bias is None else bias,
        x if norm is None else norm.weight,
        x if residual is None else residual,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm.eps,
        INPUTS=inputs,
        RESULTS=results,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        BLOCK_ROWS=block.rows,
        BLOCK_OUTPUTS=block.outputs,
        BLOCK_INPUTS=block.inputs,
        SUMS=block.sums,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlapping(),
    )
    return out


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Our own mistakes: the kernel would read beyond the end, or something else."""
    inputs = x.shape[1]
    assert weight.shape[1] == inputs
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    assert norm is None or (norm.weight.shape == (inputs,) and norm.weight.is_contiguous())
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)


@triton.jit
def _add_products(
    x_rows, weight_rows, up_rows, norm_ptr, k, row_there, column_there, total, up_total, squares,
    INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums with the products of inputs k added; squares of x, for its norm."""
    k_there = k < INPUTS
    part = tl.load(x_rows + k[None, :], mask=row_there & k_there[None, :], other=0.0)
    if HAS_NORM:
        norm_weight = tl.load(norm_ptr + k, mask=k_there, other=0.0)
        wide = part.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        part = (wide * norm_weight.to(tl.float32)[None, :]).to(part.dtype)
    there = column_there[:, None] & k_there[None, :]
    weights = tl.load(weight_rows + k[None, :], mask=there, other=0.0)
    total = tl.dot(part, tl.trans(weights), total, input_precision="ieee")
    if GATED:
        ups = tl.load(up_rows + k[None, :], mask=there, other=0.0)
        up_total = tl.dot(part, tl.trans(ups), up_total, input_precision="ieee")
    return total, up_total, squares


@triton.jit
def sum_products(
    x_rows, weight_rows, up_rows, norm_ptr, row_there, column_there,
    INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """A tile of x times weights, and times ups; with a norm also the squares of x, its scale is
    not applied. x_rows, weight_rows, up_rows: pointers  # [BLOCK_ROWS or BLOCK_OUTPUTS, 1]"""
    squares = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    total_2, up_2, total_3, up_3, total_4, up_4 = total, up_total, total, up_total, total, up_total
    for start in range(0, INPUTS, BLOCK_INPUTS * SUMS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        total, up_total, squares = _add_products(
            x_rows, weight_rows, up_rows, norm_ptr, k, row_there, column_there,
            total, up_total, squares, INPUTS, HAS_NORM, GATED,
        )  # fmt: skip
        if SUMS > 1:
            total_2, up_2, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + BLOCK_INPUTS, row_there, column_there,
                total_2, up_2, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
        if SUMS > 2:
            total_3, up_3, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + 2 * BLOCK_INPUTS, row_there,
                column_there, total_3, up_3, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
            total_4, up_4, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + 3 * BLOCK_INPUTS, row_there,
                column_there, total_4, up_4, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
    if SUMS > 1:
        total += total_2
        up_total += up_2
    if SUMS > 2:
        total += total_3 + total_4
        up_total += up_3 + up_4
    return total, up_total, squares


# One compiled form for every number of rows, so that all have the same order of sums.
@triton.jit(do_not_specialize=["num_rows"])
def _fused_linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    x_stride,
    weight_stride,
    residual_stride,
    eps,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_there = (rows < num_rows)[:, None]
    column_there = columns < RESULTS
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
    up_rows = weight_ptr + (columns + RESULTS).to(tl.int64)[:, None] * weight_stride

    if OVERLAPS:
        real_columns = tl.minimum(columns, RESULTS - 1).to(tl.int64)[:, None]
        fetch_rows(weight_ptr + real_columns * weight_stride, INPUTS)
        if GATED:
            fetch_rows(weight_ptr + (real_columns + RESULTS) * weight_stride, INPUTS)
        wait()
    total, up_total, squares = sum_products(
        x_rows, weight_rows, up_rows, norm_ptr, row_there, column_there, INPUTS, HAS_NORM, GATED,
        BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, SUMS,
    )  # fmt: skip
    if HAS_NORM:  # a row's scale may as well be applied to its sums
        scale = tl.rsqrt(squares / INPUTS + eps)[:, None]
        total *= scale
        up_total *= scale
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=column_there, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            up_bias = tl.load(bias_ptr + RESULTS + columns, mask=column_there, other=0.0)
            up_total += up_bias.to(tl.float32)[None, :]
        total = total / (1.0 + tl.exp(-total)) * up_total
    there = row_there & column_there[None, :]
    if HAS_RESIDUAL:
        places = rows.to(tl.int64)[:, None] * residual_stride + columns[None, :]
        total += tl.load(residual_ptr + places, mask=there, other=0.0).to(tl.float32)
    places = rows.to(tl.int64)[:, None] * RESULTS + columns[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=there)

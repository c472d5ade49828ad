"""Products of few rows with a layer's weights, with the operations around them in one kernel.

Decoding a small model on a GPU is bound by the number of kernels, not by their work: so the norm
before a product, and the bias, gate and residual behind it, are part of it. The norm's scale, one
number per row, is applied to the sums: so its squares are summed in the same loop as the product,
which otherwise would have to wait for them. For many rows, and for large weights, cuBLAS has the
better product; norms.py holds what then stands between two of them.

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
from peagle.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, launch_options, overlaps
from peagle.kernels.plain.linear import MAX_FUSED_ROWS, Norm

__all__ = [
    "MAX_FUSED_ROWS",
    "Norm",
    "Tile",
    "add_rms_norm",
    "fused_linear",
    "rms_norm",
    "silu_mul",
    "tile",
]


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int  # gated: so many gates and as many ups
    inputs: int  # of one turn of the loop
    warps: int
    stages: int


def tile(rows: int, outputs: int, inputs: int, gated: bool, itemsize: int) -> Tile:
    """For a product [rows, inputs] x [outputs, inputs]; `outputs` counts gates and ups alike.

    The best of 22 to 70 forms on an H200, for SmolLM2's products: narrow tiles, so that there is
    a program for every multiprocessor, and as many turns in flight as the loop has.
    """
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if itemsize > 2:  # no tensor cores: the operands must fit the registers
        return Tile(block_rows, 16, 32, warps=4, stages=2)
    narrow, long = outputs <= 640, inputs >= 1024
    if block_rows == 64:
        return Tile(64, 32 if gated else 16, 128 if long else 64, warps=4, stages=4)
    if block_rows == 32:
        if gated:
            return Tile(32, 32, 128, warps=2, stages=6)
        return Tile(32, 16, 64, warps=4, stages=8) if narrow else Tile(32, 16, 64, 2, 6)
    if gated or not narrow:
        return Tile(16, 16, 128, warps=2, stages=4)
    return Tile(16, 16, 128, warps=4, stages=8) if long else Tile(16, 16, 64, warps=2, stages=8)


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
        OVERLAPS=overlaps(rows),
        num_warps=block.warps,
        num_stages=block.stages,
        **launch_options(rows),
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
    OVERLAPS: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_there = (rows < num_rows)[:, None]
    column_there = columns < RESULTS
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
    up_rows = weight_ptr + (columns + RESULTS).to(tl.int64)[:, None] * weight_stride
    dtype = x_ptr.dtype.element_ty

    squares = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    if OVERLAPS:
        gdc_wait()
    for start in range(0, INPUTS, BLOCK_INPUTS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        k_there = k < INPUTS
        part = tl.load(x_rows + k[None, :], mask=row_there & k_there[None, :], other=0.0)
        if HAS_NORM:
            norm_weight = tl.load(norm_ptr + k, mask=k_there, other=0.0)
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            part = (wide * norm_weight.to(tl.float32)[None, :]).to(dtype)
        there = column_there[:, None] & k_there[None, :]
        weights = tl.load(weight_rows + k[None, :], mask=there, other=0.0)
        total = tl.dot(part, tl.trans(weights), total, input_precision="ieee")
        if GATED:
            ups = tl.load(up_rows + k[None, :], mask=there, other=0.0)
            up_total = tl.dot(part, tl.trans(ups), up_total, input_precision="ieee")

    if OVERLAPS:
        gdc_launch_dependents()
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

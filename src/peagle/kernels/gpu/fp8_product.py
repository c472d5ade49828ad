"""The product of few rows with 8-bit weights, which are read once, as fast as memory gives them.

A multiprocessor needs some 30 to 60 KB of weights under way to be fed. That decides the form: how
many outputs a program has, how deep its loop is pipelined, and over how many programs a row's
inputs are divided where the outputs alone would leave multiprocessors idle. Outputs are the rows of
the tensor cores' product: 64 of them and 4 warps are multiplied by Hopper's warp groups.

Hopper's 8-bit units keep fewer bits than float32, some 14, where they sum 32 products; these sums
of 32 are added in float32. So results are near the plain twin's, not equal to them.

Shapes: N rows, I inputs, O outputs, S parts of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlapping
from peagle.kernels.reference.fp8 import FP8, Quantized, Sums


class Form(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int
    inputs: int  # of one turn of the loop
    warps: int
    stages: int
    splits: int = 1  # S


def few_rows_product(
    rows: Quantized,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    f: Form,
) -> Sums:
    """One launch. All rows must fit a tile of the form: weights are read once."""
    (num_rows, inputs), outputs = rows.values.shape, weight.shape[0]
    _check(rows, weight, scales, bias)
    assert num_rows <= f.rows
    whole = f.splits == 1
    shape = (f.splits, num_rows, outputs)
    out = torch.empty(shape, dtype=dtype if whole else torch.float32, device=weight.device)
    if num_rows:
        _product[(triton.cdiv(outputs, f.outputs), f.splits)](
            rows.values,
            rows.scales,
            weight,
            scales,
            scales if bias is None else bias,  # a pointer that is not read must still be one
            out,
            num_rows,
            outputs,
            inputs,
            f.inputs * triton.cdiv(triton.cdiv(inputs, f.inputs), f.splits),
            HAS_BIAS=whole and bias is not None,
            BLOCK_ROWS=f.rows,
            BLOCK_OUTPUTS=f.outputs,
            BLOCK_INPUTS=f.inputs,
            num_warps=f.warps,
            num_stages=f.stages,
            **overlapping(),
        )
    return Sums(out, None if whole else bias, dtype)


def _check(rows: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Our own mistakes: the kernel would read beyond the end, or something else."""
    outputs, inputs = weight.shape
    assert weight.dtype == rows.values.dtype == FP8
    assert rows.values.shape[1] == inputs
    assert inputs % 16 == 0  # 16 bytes are loaded at once
    assert scales.shape == (outputs, 1)
    assert bias is None or bias.shape == (outputs,)
    assert all(t is None or t.is_contiguous() for t in (*rows, weight, scales, bias))


# One compiled form for every number of rows, so that all have the same order of sums.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    split_inputs,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    row_there, column_there = rows < num_rows, columns < num_outputs
    x_rows = x_ptr + rows[:, None] * num_inputs
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * num_inputs
    first = split * split_inputs
    last = tl.minimum(first + split_inputs, num_inputs)

    if OVERLAPS:
        gdc_wait()
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for start in range(first, last, BLOCK_INPUTS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        x = _load(x_rows, k, row_there, last)
        weights = _load(weight_rows, k, column_there, last)
        total = tl.dot(weights, tl.trans(x), total, max_num_imprecise_acc=32)
    if OVERLAPS:
        gdc_launch_dependents()
    total = tl.trans(total)

    row_scales = tl.load(row_scales_ptr + rows, mask=row_there, other=0.0)
    scales = tl.load(scales_ptr + columns, mask=column_there, other=0.0)
    out = (total * row_scales[:, None] * scales[None, :]).to(out_ptr.dtype.element_ty)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=column_there, other=0.0).to(tl.float32)
        out = (out.to(tl.float32) + bias[None, :]).to(out_ptr.dtype.element_ty)
    places = (split * num_rows + rows).to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(out_ptr + places, out, mask=row_there[:, None] & column_there[None, :])


@triton.jit
def _load(rows, k, row_there, last):
    there = row_there[:, None] & (k < last)[None, :]
    return tl.load(rows + k[None, :], mask=there, other=0.0)

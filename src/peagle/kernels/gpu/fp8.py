"""Layers with 8-bit weights: their products, and what stands between two of these.

Products of few rows are our own kernel's: the weights are read once, as fast as memory gives them;
those of many are torch's. A multiprocessor needs some 30 to 60 KB of weights under way to be fed.
That decides the form: how many outputs a program has, how deep its loop is pipelined, and over how
many programs a row's inputs are divided where the outputs alone would leave multiprocessors idle.
Outputs are the rows of the tensor cores' product: 64 of them and 4 warps are multiplied by Hopper's
warp groups. Hopper's 8-bit units keep fewer bits than float32, some 14, where they sum 32 products;
these sums of 32 are added in float32. So results are near the reference's, not equal to them.

Between two products there is one launch: the end of the one, a norm or a gate, and the rows as
8-bit floats for the next. A program has a whole row in its registers: it is read once, though its
largest number decides how it is written.

The reference is kernels/reference/fp8.py.
Shapes: N rows, I inputs, O outputs, S parts of the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlapping
from peagle.kernels.reference.fp8 import FP8, LARGEST, SMALLEST_SCALE, Quantized, Sums
from peagle.kernels.reference.linear import Norm

MAX_FEW_ROWS = 64  # beyond, a tile would not hold them all: weights would be read again
MANY_OUTPUTS = 16_384
# By the rows of a form: three or two for each of an H200's 132 multiprocessors.
WANTED_PROGRAMS = {16: 400, 32: 400, 64: 264}
MIN_SPLIT = 1024  # inputs
FINISH_COLUMNS = 1024  # of a program that only adds


class Form(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int
    inputs: int  # of one turn of the loop
    warps: int
    stages: int
    splits: int = 1  # S


def choose_form(rows: int, outputs: int, inputs: int) -> Form:
    """For a product [rows, inputs] x [outputs, inputs]. The same for every rows <= 16: then a row
    has the same bits alone or beside others.

    Measured on an H200 for the four products of an 8B-class target with 1, 8, 32 and 64 rows: the
    best of 9 to 30 forms each, or within 5 % of it. Other sizes follow the same rule unmeasured.
    """
    block = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if rows > 32 and outputs >= MANY_OUTPUTS:
        return Form(block, 128, 128, warps=4, stages=4)
    form = Form(block, 64, 128, warps=4, stages=5)
    if outputs >= MANY_OUTPUTS:  # enough programs; adding parts would be a launch more
        return form
    most = min(WANTED_PROGRAMS[block] // -(-outputs // form.outputs), inputs // MIN_SPLIT)
    equal_parts = (s for s in range(1, most + 1) if inputs % (s * form.inputs) == 0)
    return form._replace(splits=max(equal_parts, default=1))


def product(
    rows: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Sums:
    """Quantised rows times weight [O, I] in FP8 with scales [O, 1]. I and O: multiples of 16.

    Near the reference's result, not equal to it: see above.
    """
    num_rows = rows.values.shape[0]
    if num_rows <= MAX_FEW_ROWS:
        form = choose_form(num_rows, *weight.shape)
        return few_rows_product(rows, weight, scales, bias, dtype, form)
    # Without fast accumulation partial sums go to float32.
    # The result is bfloat16 whatever dtype is: torch has no other with a scale for each row.
    out = torch._scaled_mm(
        rows.values,
        weight.t(),  # column-major, as it must be
        scale_a=rows.scales,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return Sums(out.to(dtype)[None], bias, dtype)


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I], quantised here, times weight [O, I] in FP8 with scales [O, 1], plus bias [O]."""
    return finish(product(quantize_rows(x), weight, scales, bias, x.dtype))


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
    _check_product(rows, weight, scales, bias)
    assert num_rows <= f.rows
    whole = f.splits == 1
    shape = (f.splits, num_rows, outputs)
    out = torch.empty(shape, dtype=dtype if whole else torch.float32, device=weight.device)
    if num_rows:
        _few_rows_product[(triton.cdiv(outputs, f.outputs), f.splits)](
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


def _check_product(rows: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    """Our own mistakes: the kernel would read beyond the end, or something else."""
    outputs, inputs = weight.shape
    assert weight.dtype == rows.values.dtype == FP8
    assert rows.values.shape[1] == inputs
    assert inputs % 16 == 0  # 16 bytes are loaded at once
    assert scales.shape == (outputs, 1)
    assert bias is None or bias.shape == (outputs,)
    assert all(t is None or t.is_contiguous() for t in (*rows, weight, scales, bias))


def quantize_rows(x: Tensor) -> Quantized:
    """x [N, I]. A row's largest number becomes LARGEST."""
    return quantize_normed(Sums(x[None], None, x.dtype), None, None)[0]


def quantize_gated(gate_up: Tensor) -> Quantized:
    """silu(gate) * up, rounded to the type of gate_up [N, 2I], then quantised."""
    assert gate_up.stride(1) == 1
    out = _empty(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device)
    if gate_up.shape[0]:
        _quantize_gated_row[(gate_up.shape[0],)](
            gate_up, *out, gate_up.stride(0), **_row_options(out.values.shape[1])
        )
    return out


def quantize_normed(
    sums: Sums, residual: Tensor | None, norm: Norm | None
) -> tuple[Quantized, Tensor]:
    """-> the norm of the product plus residual [N, O], quantised, and the sum itself [N, O].

    norm None: the sum is quantised as it is.
    """
    parts, bias, dtype = sums
    splits, num_rows, columns = parts.shape
    _check_sums(sums, residual)
    assert norm is None or (norm.weight.shape == (columns,) and norm.weight.is_contiguous())
    out = _empty(num_rows, columns, parts.device)
    is_new = residual is not None or bias is not None or splits > 1
    summed = torch.empty_like(parts[0], dtype=dtype) if is_new else parts[0]
    if num_rows:
        _quantize_normed_row[(num_rows,)](
            parts,
            parts if bias is None else bias,  # a pointer that is not read must still be one
            parts if residual is None else residual,
            parts if norm is None else norm.weight,
            summed,
            *out,
            *_strides(parts),
            0 if residual is None else residual.stride(0),
            summed.stride(0),
            0.0 if norm is None else norm.eps,
            SPLITS=splits,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            HAS_NORM=norm is not None,
            STORES_SUM=is_new,
            **_row_options(columns),
        )
    return out, summed


def finish(sums: Sums, residual: Tensor | None = None) -> Tensor:
    """The product itself [N, O], plus residual [N, O]; no launch where it is whole already."""
    parts, bias, dtype = sums
    splits, num_rows, columns = parts.shape
    _check_sums(sums, residual)
    if splits == 1 and bias is None and residual is None:
        return parts[0]
    out = torch.empty(num_rows, columns, dtype=dtype, device=parts.device)
    if num_rows:
        _finish_row[(num_rows, triton.cdiv(columns, FINISH_COLUMNS))](
            parts,
            parts if bias is None else bias,
            parts if residual is None else residual,
            out,
            *_strides(parts),
            0 if residual is None else residual.stride(0),
            COLUMNS=columns,
            SPLITS=splits,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            BLOCK=FINISH_COLUMNS,
            num_warps=4,
            **overlapping(),
        )
    return out


def _row_options(columns: int) -> dict[str, Any]:
    block = triton.next_power_of_2(columns)
    return {
        "COLUMNS": columns,
        "LARGEST": LARGEST,
        "SMALLEST_SCALE": SMALLEST_SCALE,
        "BLOCK": block,
        "num_warps": min(max(block // 512, 4), 16),
        **overlapping(),
    }


def _empty(rows: int, columns: int, device: torch.device) -> Quantized:
    values = torch.empty((rows, columns), dtype=FP8, device=device)
    return Quantized(values, torch.empty((rows, 1), dtype=torch.float32, device=device))


def _strides(parts: Tensor) -> tuple[int, int]:
    """Of parts and rows; that of a single part is not read, and must not ask for a new form."""
    return parts.stride(0) if parts.shape[0] > 1 else 0, parts.stride(1)


def _check_sums(sums: Sums, residual: Tensor | None) -> None:
    parts, bias, dtype = sums
    assert parts.stride(2) == 1
    assert parts.dtype == dtype or parts.shape[0] > 1
    assert bias is None or (bias.shape == parts.shape[2:] and bias.is_contiguous())
    assert residual is None or (residual.shape == parts.shape[1:] and residual.stride(1) == 1)


# One compiled form for every number of rows, so that all have the same order of sums.
@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_product(
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


@triton.jit
def _quantize_normed_row(
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
def _quantize_gated_row(
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
def _finish_row(
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
    # div_rn is the reference's division; a GPU's `/` is a little off
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

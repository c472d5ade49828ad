"""Rows as 8-bit floats in one launch, and the product that the GPU's own 8-bit units do.

Shapes: N rows, I inputs, O outputs. The twin is kernels/plain/fp8.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.plain.fp8 import FP8, LARGEST, SMALLEST_SCALE

MAX_COLUMNS = 1024  # of a row that a program holds at once; longer rows are read in parts


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] -> in FP8 [N, I], and the float32 number that each row is multiplied with [N, 1]."""
    rows, columns = x.shape
    assert x.stride(1) == 1
    out = torch.empty((rows, columns), dtype=FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        _quantize_row[(rows,)](
            x,
            out,
            scales,
            x.stride(0),
            columns,
            LARGEST=LARGEST,
            SMALLEST_SCALE=SMALLEST_SCALE,
            BLOCK=min(triton.next_power_of_2(columns), MAX_COLUMNS),
            num_warps=4,
        )
    return out, scales


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I], quantised here, times weight [O, I] in FP8 with scales [O, 1], plus bias [O].

    I and O are multiples of 16. The result is rounded to bfloat16 whatever x is: torch's product
    with a scale for each row has no other output everywhere.
    """
    quantized, row_scales = quantize_rows(x)
    # Without fast accumulation partial sums are kept in float32, as the plain twin keeps them;
    # with it they have fewer bits, for a speed that few rows, bound by memory, do not gain.
    out = torch._scaled_mm(
        quantized,
        weight.t(),  # column-major, as it must be
        scale_a=row_scales,
        scale_b=scales.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    ).to(x.dtype)
    return out if bias is None else out.add_(bias)


@triton.jit
def _quantize_row(
    x,
    out,
    scales,
    row_stride,
    columns,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        values = tl.load(x + row * row_stride + start + offsets, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(values.to(tl.float32)))
    # div_rn is the plain twin's division; a GPU's `/` is a little off
    scale = tl.maximum(tl.div_rn(tl.max(largest, axis=0), LARGEST), SMALLEST_SCALE)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        values = tl.load(x + row * row_stride + start + offsets, mask=inside, other=0.0)
        # No number exceeds LARGEST, and NaN stays NaN: nothing is clamped.
        scaled = tl.div_rn(values.to(tl.float32), scale)
        tl.store(out + row * columns + start + offsets, scaled.to(tl.float8e4nv), mask=inside)

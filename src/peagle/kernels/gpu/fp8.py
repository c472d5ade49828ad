"""Products with 8-bit weights on a GPU: of few rows by our own kernel, of many by torch's.

Shapes: N rows, I inputs, O outputs, S parts. The twin is kernels/plain/fp8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.gpu import fp8_rows
from peagle.kernels.gpu.fp8_product import Form, few_rows_product
from peagle.kernels.gpu.fp8_rows import finish
from peagle.kernels.plain.fp8 import FP8, Quantized, Sums
from peagle.kernels.plain.linear import Norm

__all__ = [
    "MAX_FEW_ROWS",
    "choose_form",
    "finish",
    "product",
    "quantize_gated",
    "quantize_normed",
    "quantize_rows",
    "scaled_linear",
]

MAX_FEW_ROWS = 64  # beyond, products and not bytes cost, and the 8-bit units are ahead
WANTED_PROGRAMS = 400  # three for each of an H200's 132 multiprocessors
MIN_SPLIT = 1024  # inputs


def choose_form(rows: int, outputs: int, inputs: int) -> Form:
    """For a product [rows, inputs] x [outputs, inputs]. The same for every rows <= 16: then a row
    has the same bits alone or beside others. Not measured yet: by what must be under way."""
    if rows > 32:
        narrow = Form(64, 64, 128, warps=4, stages=4, outputs_first=True)
    elif outputs >= 16_384:
        return Form(16 if rows <= 16 else 32, 64, 128, warps=4, stages=5, early=True)
    else:
        narrow = Form(16 if rows <= 16 else 32, 32, 256, warps=4, stages=4, early=True)
    # The parts of a few outputs are added by whatever follows. Those of many are not divided: for
    # them it would be a launch more.
    splits = 1 if outputs > 4096 else _splits(-(-outputs // narrow.outputs), inputs, narrow.inputs)
    return narrow._replace(splits=splits)


def _splits(programs: int, inputs: int, block: int) -> int:
    """Over how many programs the inputs are divided, in equal parts."""
    most = min(WANTED_PROGRAMS // programs, inputs // MIN_SPLIT)
    return max((s for s in range(1, most + 1) if inputs % (s * block) == 0), default=1)


def quantize_rows(x: Tensor) -> Quantized:
    """x [N, I], in the type that `product` takes for so many rows."""
    return fp8_rows.quantize(x, _type_of(x.shape[0]))


def quantize_gated(gate_up: Tensor) -> Quantized:
    """silu(gate) * up, rounded to the type of gate_up [N, 2I], then quantised."""
    return fp8_rows.quantize_gated(gate_up, _type_of(gate_up.shape[0]))


def quantize_normed(sums: Sums, residual: Tensor | None, norm: Norm) -> tuple[Quantized, Tensor]:
    """-> the norm of the product plus residual [N, O], quantised, and the sum itself [N, O]."""
    return fp8_rows.quantize_normed(sums, residual, norm, _type_of(sums.parts.shape[1]))


def product(
    rows: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Sums:
    """Quantised rows times weight [O, I] in FP8 with scales [O, 1]. I and O: multiples of 16."""
    num_rows = rows.values.shape[0]
    if num_rows <= MAX_FEW_ROWS:
        form = choose_form(num_rows, *weight.shape)
        return few_rows_product(rows, weight, scales, bias, dtype, form)
    # Without fast accumulation partial sums are kept in float32, as the plain twin keeps them.
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


def _type_of(num_rows: int) -> torch.dtype:
    return torch.float16 if num_rows <= MAX_FEW_ROWS else FP8

"""Products with 8-bit weights on a GPU: of few rows by our own kernel, of many by torch's.

Shapes: N rows, I inputs, O outputs, S parts. The twin is kernels/reference/fp8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.gpu.fp8_product import Form, few_rows_product
from peagle.kernels.gpu.fp8_rows import finish, quantize_gated, quantize_normed, quantize_rows
from peagle.kernels.reference.fp8 import Quantized, Sums

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

MAX_FEW_ROWS = 64  # beyond, a tile would not hold them all: weights would be read again
MANY_OUTPUTS = 16_384
# By the rows of a form: three or two for each of an H200's 132 multiprocessors.
WANTED_PROGRAMS = {16: 400, 32: 400, 64: 264}
MIN_SPLIT = 1024  # inputs


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

    Near the plain twin's result, not equal to it: see fp8_product.py.
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

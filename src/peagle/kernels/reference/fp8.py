"""Rows as 8-bit floats, each with a scale of its own, and the product of two such matrices.

Shapes: N rows, I inputs, O outputs, S parts that a product's inputs were divided into (one here).
A row's numbers never depend on the rows beside it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.cpu.linear import PackedWeight, packed
from peagle.kernels.reference.linear import Norm, rms_norm, silu_mul

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8
SMALLEST_SCALE = 1e-30  # a row of zeros stays one


class Quantized(NamedTuple):
    values: Tensor  # [N, I] FP8
    scales: Tensor  # [N, 1] float32: what each row is multiplied with


class Sums(NamedTuple):
    """A product before its end: the parts are to be added, rounded to dtype, then comes the bias,
    rounded again. Whoever reads it does that: so the end of a product needs no launch."""

    parts: Tensor  # [S, N, O]; a single part is rounded already
    bias: Tensor | None  # [O]
    dtype: torch.dtype


def quantize_rows(x: Tensor) -> Quantized:
    """x [N, I]. A row's largest number becomes LARGEST, so none overflows; NaN and infinity
    become NaN."""
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # By a tensor: torch divides by a number as by its rounded inverse on a GPU.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_(min=SMALLEST_SCALE)
    precise = x if x.dtype.itemsize >= 4 else x.float()
    return Quantized((precise / scales).to(FP8), scales)


def quantize_gated(gate_up: Tensor) -> Quantized:
    """silu(gate) * up, rounded to the type of gate_up [N, 2I], then quantised."""
    return quantize_rows(silu_mul(gate_up))


def quantize_normed(sums: Sums, residual: Tensor | None, norm: Norm) -> tuple[Quantized, Tensor]:
    """-> the norm of the product plus residual [N, O], quantised, and the sum itself [N, O]."""
    summed = finish(sums, residual)
    return quantize_rows(rms_norm(summed, *norm)), summed


def product(
    rows: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Sums:
    """Quantised rows times weight [O, I] in FP8 with scales [O, 1].

    The products of quantised numbers are summed in float32 or better; then come the scales.
    """
    precise = torch.promote_types(dtype, torch.float32)
    wide, wide_weight = rows.values.to(precise), packed(weight.to(precise))
    if isinstance(wide_weight, PackedWeight):  # for this product alone: a row's bits are its own
        sums = wide_weight.product(wide)
    else:
        sums = F.linear(wide, wide_weight)
    out = (sums * rows.scales * scales.t()).to(dtype)
    return Sums(out[None], bias, dtype)


def finish(sums: Sums, residual: Tensor | None = None) -> Tensor:
    """The product itself [N, O], plus residual [N, O]."""
    total: Tensor = functools.reduce(torch.add, sums.parts)  # in their order
    out = total.to(sums.dtype)
    out = out if sums.bias is None else out + sums.bias
    return out if residual is None else out + residual


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I], quantised here, times weight [O, I] in FP8 with scales [O, 1], plus bias [O]."""
    return finish(product(quantize_rows(x), weight, scales, bias, x.dtype))

"""Rows as 8-bit floats, each with a scale of its own, and the product of two such matrices.

Shapes: N rows, I inputs, O outputs. A row's numbers never depend on the rows beside it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.linear import linear_kernel_for

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of FP8
SMALLEST_SCALE = 1e-30  # a row of zeros stays one


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, I] -> in FP8 [N, I], and the float32 number that each row is multiplied with [N, 1].

    A row's largest number becomes LARGEST, so none overflows; NaN and infinity become NaN.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    # By a tensor: torch divides by a number as by its rounded inverse on a GPU.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_(min=SMALLEST_SCALE)
    precise = x if x.dtype.itemsize >= 4 else x.float()
    return (precise / scales).to(FP8), scales


def scaled_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I], quantised here, times weight [O, I] in FP8 with scales [O, 1], plus bias [O].

    The products of quantised numbers are summed in float32 or better; then come the scales.
    """
    quantized, row_scales = quantize_rows(x)
    precise = torch.promote_types(x.dtype, torch.float32)
    wide, wide_weight = quantized.to(precise), weight.to(precise)
    kernel = linear_kernel_for(wide, wide_weight)  # on a CPU: a row's bits are its own
    sums = kernel(wide, wide_weight) if kernel else F.linear(wide, wide_weight)
    out = (sums * row_scales * scales.t()).to(x.dtype)
    return out if bias is None else out.add_(bias)

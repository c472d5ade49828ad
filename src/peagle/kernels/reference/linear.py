"""Products, norms and gates of a decoder layer, in torch: what the GPU kernels compute.

Shapes: M rows, K inputs, N outputs, H hidden, I intermediate. Sums are float32 or better.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm(NamedTuple):
    weight: Tensor  # [K]
    eps: float


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
    """-> [M, N], or silu(gate) * up [M, N / 2].

    The norm's weight is applied to x, its scale to the sums: equal to `rms_norm` up to rounding.
    """
    if norm is None:
        out = F.linear(at_least_float32(x), at_least_float32(weight))
    else:
        scale = at_least_float32(x).square().mean(-1, keepdim=True).add(norm.eps).rsqrt()
        weighted = (at_least_float32(x) * at_least_float32(norm.weight)).to(x.dtype)
        out = F.linear(at_least_float32(weighted), at_least_float32(weight)) * scale
    if bias is not None:
        out = out + at_least_float32(bias)
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = F.silu(gate) * up
    if residual is not None:
        out = out + at_least_float32(residual)
    return out.to(out_dtype or x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, H] times weight [H]. Half precision is rounded before the weight, as RMSNorm does."""
    normed = F.rms_norm(at_least_float32(x), weight.shape, None, eps)
    return normed.to(x.dtype) * weight


def norm_pair(
    first: Tensor,  # [M, H]
    second: Tensor,  # [M, H]
    first_weight: Tensor,  # [H]
    second_weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """The norms of both, side by side: [M, 2H]."""
    normed = rms_norm(first, first_weight, eps), rms_norm(second, second_weight, eps)
    return torch.cat(normed, dim=-1)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """-> the norm of x + residual [M, H], and the sum itself."""
    summed = x + residual
    return rms_norm(summed, weight, eps), summed


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [M, 2I] -> [M, I]."""
    gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()

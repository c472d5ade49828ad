"""What stands between two products with 8-bit weights, in one launch each: the end of the one, a
norm or a gate, and the rows as 8-bit floats for the next. Twins: kernels/reference/fp8.py.

A program has a whole row in its registers: it is read once, though its largest number decides how
it is written. Shapes: N rows, I inputs, O outputs, S parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from peagle.kernels.gpu.fp8_row_kernels import finish_row, quantize_gated_row, quantize_normed_row
from peagle.kernels.gpu.overlap import overlapping
from peagle.kernels.reference.fp8 import FP8, LARGEST, SMALLEST_SCALE, Quantized, Sums
from peagle.kernels.reference.linear import Norm

FINISH_COLUMNS = 1024  # of a program that only adds


def quantize_rows(x: Tensor) -> Quantized:
    """x [N, I]. A row's largest number becomes LARGEST."""
    return quantize_normed(Sums(x[None], None, x.dtype), None, None)[0]


def quantize_gated(gate_up: Tensor) -> Quantized:
    """silu(gate) * up, rounded to the type of gate_up [N, 2I], then quantised."""
    assert gate_up.stride(1) == 1
    out = _empty(gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device)
    if gate_up.shape[0]:
        quantize_gated_row[(gate_up.shape[0],)](
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
    _check(sums, residual)
    assert norm is None or (norm.weight.shape == (columns,) and norm.weight.is_contiguous())
    out = _empty(num_rows, columns, parts.device)
    is_new = residual is not None or bias is not None or splits > 1
    summed = torch.empty_like(parts[0], dtype=dtype) if is_new else parts[0]
    if num_rows:
        quantize_normed_row[(num_rows,)](
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
    _check(sums, residual)
    if splits == 1 and bias is None and residual is None:
        return parts[0]
    out = torch.empty(num_rows, columns, dtype=dtype, device=parts.device)
    if num_rows:
        finish_row[(num_rows, triton.cdiv(columns, FINISH_COLUMNS))](
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


def _check(sums: Sums, residual: Tensor | None) -> None:
    parts, bias, dtype = sums
    assert parts.stride(2) == 1
    assert parts.dtype == dtype or parts.shape[0] > 1
    assert bias is None or (bias.shape == parts.shape[2:] and bias.is_contiguous())
    assert residual is None or (residual.shape == parts.shape[1:] and residual.stride(1) == 1)

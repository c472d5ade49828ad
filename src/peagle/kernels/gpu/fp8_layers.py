"""A stack of decoder layers with 8-bit weights: what stands between two products is one launch,
with the end of the first and the quantising for the second. 10 launches a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.kernels.gpu.fp8 import (
    finish,
    product,
    quantize_gated,
    quantize_normed,
    quantize_rows,
)
from peagle.kernels.layer_tensors import LayerTensors, Projection
from peagle.kernels.reference.fp8 import Quantized, Sums
from peagle.kernels.reference.linear import Norm


def run_quantized(
    layers: Sequence[LayerTensors],
    x: Tensor,  # [N, H]
    inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
    attend: Callable[[int, Tensor], Tensor],
) -> list[Tensor]:
    """-> the output [N, H] of every layer. A sum goes with the norm that follows it: that of the
    next layer after the last product."""
    rows = _first_rows(layers[0], x, inputs)
    states = []
    for depth, (layer, after) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
        attended = attend(depth, finish(_product(layer.qkv, rows, x.dtype)))
        sums = _product(layer.o, quantize_rows(attended), x.dtype)
        rows, x = quantize_normed(sums, x, Norm(layer.post_norm, layer.eps))
        gate_up = finish(_product(layer.gate_up, rows, x.dtype))
        sums = _product(layer.down, quantize_gated(gate_up), x.dtype)
        if after is None:
            x = finish(sums, x)
        else:
            assert after.input_norm is not None
            rows, x = quantize_normed(sums, x, Norm(after.input_norm, after.eps))
        states.append(x)
    return states


def _first_rows(layer: LayerTensors, x: Tensor, inputs: Tensor | None) -> Quantized:
    if layer.input_norm is None:
        assert inputs is not None
        return quantize_rows(inputs)
    norm = Norm(layer.input_norm, layer.eps)
    return quantize_normed(Sums(x[None], None, x.dtype), None, norm)[0]


def _product(projection: Projection, rows: Quantized, dtype: torch.dtype) -> Sums:
    weight, bias, scales = projection
    assert scales is not None
    return product(rows, weight, scales, bias, dtype)

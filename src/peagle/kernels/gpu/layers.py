"""A stack of decoder layers over a paged cache, in few kernels per layer.

The plain twin is the layers' modules, run with a RowsAttention. Shapes: N rows, H hidden, h heads,
g key-value heads, D head dimension, L layers, S slots, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.gpu.attention import paged_attention, rotate_and_write
from peagle.kernels.gpu.fp8_layers import run_quantized
from peagle.kernels.gpu.linear import fused_linear
from peagle.kernels.gpu.norms import add_rms_norm, rms_norm, silu_mul
from peagle.kernels.layer import LayerTensors, Projection
from peagle.kernels.plain.linear import MAX_NORMED_ROWS, Norm, fits_fused
from peagle.kernels.rows import PagedRows

Attend = Callable[[int, Tensor], Tensor]  # layer and its qkv [N, (h + 2g) * D] -> [N, h * D]


def run_layers(
    layers: Sequence[LayerTensors],
    x: Tensor,  # [N, H]
    inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
    cos: Tensor,  # [P, D]
    sin: Tensor,  # [P, D], the first half negated
    rows: PagedRows,
    keys: Tensor,  # [L, S, g, D]
    values: Tensor,  # [L, S, g, D]
) -> list[Tensor]:
    """-> the output [N, H] of every layer."""
    assert (inputs is None) == (layers[0].input_norm is not None)

    def attend(depth: int, qkv: Tensor) -> Tensor:
        layer, cache = layers[depth], (keys[depth], values[depth])
        norms = (layer.q_norm, layer.k_norm, layer.eps)
        q = rotate_and_write(qkv, rows, cos, sin, *norms, *cache)
        return paged_attention(q, *cache, rows, layer.window).flatten(-2)

    projections = [p for layer in layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if any(p.scales is not None for p in projections):
        return run_quantized(layers, x, inputs, attend)
    run = _few_rows if fits_fused(x, [p.weight for p in projections]) else _many_rows
    return run(layers, x, inputs, attend)


def _few_rows(
    layers: Sequence[LayerTensors], x: Tensor, inputs: Tensor | None, attend: Attend
) -> list[Tensor]:
    states = []
    for depth, layer in enumerate(layers):
        norm = None if layer.input_norm is None else Norm(layer.input_norm, layer.eps)
        reads = inputs if norm is None else x
        assert reads is not None
        attended = attend(depth, _fused(layer.qkv, reads, norm=norm))
        x = _fused(layer.o, attended, residual=x)
        inner = _fused(layer.gate_up, x, norm=Norm(layer.post_norm, layer.eps), gated=True)
        x = _fused(layer.down, inner, residual=x)
        states.append(x)
    return states


def _many_rows(
    layers: Sequence[LayerTensors], x: Tensor, inputs: Tensor | None, attend: Attend
) -> list[Tensor]:
    """A sum goes with the norm that follows it: that of the next layer after the last product."""
    first, following = layers[0], [*layers[1:], None]
    if first.input_norm is not None:
        inputs = rms_norm(x, first.input_norm, first.eps)
    states = []
    for depth, (layer, after) in enumerate(zip(layers, following, strict=True)):
        assert inputs is not None
        attended = _product(layer.o, attend(depth, _product(layer.qkv, inputs)))
        normed, x = add_rms_norm(attended, x, layer.post_norm, layer.eps)
        out = _product(layer.down, silu_mul(_product(layer.gate_up, normed)))
        if after is None:
            x = x + out
        else:
            assert after.input_norm is not None
            inputs, x = add_rms_norm(out, x, after.input_norm, after.eps)
        states.append(x)
    return states


def _fused(
    projection: Projection,
    x: Tensor,  # [N, I]
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    weight, bias, _ = projection
    if norm is not None and x.shape[0] > MAX_NORMED_ROWS:
        x, norm = rms_norm(x, *norm), None
    return fused_linear(x, weight, bias, norm=norm, residual=residual, gated=gated)


def _product(projection: Projection, x: Tensor) -> Tensor:
    weight, bias, _ = projection
    return F.linear(x, weight, bias)

"""A stack of decoder layers over a paged cache, in few kernels per layer.

The reference is the layers' modules, run with a RowsAttention. Shapes: N rows, H hidden, h heads,
g key-value heads, D head dimension, L layers, S slots, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.gpu.attention import paged_attention
from peagle.kernels.gpu.fp8 import finish, product, quantize_gated, quantize_normed, quantize_rows
from peagle.kernels.gpu.linear import fused_linear
from peagle.kernels.gpu.norms import add_rms_norm, rms_norm, silu_mul
from peagle.kernels.gpu.qkv import fits_one_kernel, qkv_to_cache, rotate_and_write
from peagle.kernels.layer_tensors import LayerTensors, Projection
from peagle.kernels.policy import FAST, Policy
from peagle.kernels.reference.fp8 import Quantized, Sums
from peagle.kernels.reference.linear import Norm
from peagle.kernels.rows import RowGroups


class _Attention(NamedTuple):
    """Of every layer: what the step's new rows read and write of the cache."""

    layers: Sequence[LayerTensors]
    cos: Tensor  # [P, D]
    sin: Tensor  # [P, D], the first half negated
    rows: Sequence[RowGroups]
    keys: Sequence[Tensor]  # [S, g, D] each
    values: Sequence[Tensor]
    policy: Policy

    def of_qkv(self, depth: int, qkv: Tensor) -> Tensor:
        """The layer's qkv [N, (h + 2g) * D] -> [N, h * D]."""
        layer, cache = self.layers[depth], (self.keys[depth], self.values[depth])
        norms = (layer.q_norm, layer.k_norm, layer.eps)
        q = rotate_and_write(qkv, self.rows[depth], self.cos, self.sin, *norms, *cache)
        return self._read(depth, q)

    def of_rows(self, depth: int, x: Tensor, norm: Norm | None) -> Tensor:
        """The same with the product before it, of few rows: x [N, I] -> [N, h * D]."""
        layer, keys, policy = self.layers[depth], self.keys[depth], self.policy
        if not fits_one_kernel(layer, x, keys.shape[-1], policy):
            return self.of_qkv(depth, _fused(layer.qkv, x, policy, norm=norm))
        x, norm = _norm_left_to(layer.qkv.weight, x, norm, policy)
        q = qkv_to_cache(
            x,
            layer.qkv.weight,
            layer.qkv.bias,
            norm=norm,
            rows=self.rows[depth],
            cos=self.cos,
            sin=self.sin,
            keys=keys,
            values=self.values[depth],
            policy=policy,
        )
        return self._read(depth, q)

    def _read(self, depth: int, q: Tensor) -> Tensor:
        """Queries [N, h, D] -> [N, h * D]."""
        cache, window = (self.keys[depth], self.values[depth]), self.layers[depth].window
        out = torch.empty_like(q)
        rows = self.rows[depth]
        parts = rows.parts(q), rows.parts(out), rows.groups
        for own, result, group in zip(*parts, strict=True):
            paged_attention(own, *cache, group, window, self.policy, out=result)
        return out.flatten(-2)


def run_layers(
    layers: Sequence[LayerTensors],
    x: Tensor,  # [N, H]
    inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
    cos: Tensor,  # [P, D]
    sin: Tensor,  # [P, D], the first half negated
    rows: Sequence[RowGroups],  # by layer, as all that follows
    keys: Sequence[Tensor],  # [S, g, D] each
    values: Sequence[Tensor],
    policy: Policy = FAST,
) -> list[Tensor]:
    """-> the output [N, H] of every layer."""
    assert (inputs is None) == (layers[0].input_norm is not None)
    attention = _Attention(layers, cos, sin, rows, keys, values, policy)
    projections = [p for layer in layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    if any(p.scales is not None for p in projections):
        assert not policy.batch_invariant
        return _with_quantized_products(layers, x, inputs, attention.of_qkv)
    fused = policy.fits_fused(x, [p.weight for p in projections])
    run = _with_fused_products if fused else _with_cublas
    return run(layers, x, inputs, attention)


def _with_fused_products(
    layers: Sequence[LayerTensors], x: Tensor, inputs: Tensor | None, attention: _Attention
) -> list[Tensor]:
    states, policy = [], attention.policy
    for depth, layer in enumerate(layers):
        norm = None if layer.input_norm is None else Norm(layer.input_norm, layer.eps)
        reads = inputs if norm is None else x
        assert reads is not None
        attended = attention.of_rows(depth, reads, norm)
        x = _fused(layer.o, attended, policy, residual=x)
        norm = Norm(layer.post_norm, layer.eps)
        inner = _fused(layer.gate_up, x, policy, norm=norm, gated=True)
        x = _fused(layer.down, inner, policy, residual=x)
        states.append(x)
    return states


def _with_cublas(
    layers: Sequence[LayerTensors], x: Tensor, inputs: Tensor | None, attention: _Attention
) -> list[Tensor]:
    """A sum goes with the norm that follows it: that of the next layer after the last product."""
    first, following = layers[0], [*layers[1:], None]
    if first.input_norm is not None:
        inputs = rms_norm(x, first.input_norm, first.eps)
    states = []
    for depth, (layer, after) in enumerate(zip(layers, following, strict=True)):
        assert inputs is not None
        attended = _linear(layer.o, attention.of_qkv(depth, _linear(layer.qkv, inputs)))
        normed, x = add_rms_norm(attended, x, layer.post_norm, layer.eps)
        out = _linear(layer.down, silu_mul(_linear(layer.gate_up, normed)))
        if after is None:
            x = x + out
        else:
            assert after.input_norm is not None
            inputs, x = add_rms_norm(out, x, after.input_norm, after.eps)
        states.append(x)
    return states


def _with_quantized_products(
    layers: Sequence[LayerTensors],
    x: Tensor,  # [N, H]
    inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
    attend: Callable[[int, Tensor], Tensor],
) -> list[Tensor]:
    """With 8-bit weights what stands between two products is one launch, with the end of the first
    and the quantising for the second: 10 launches a layer. A sum goes with the norm that follows
    it: that of the next layer after the last product."""
    rows = _first_rows(layers[0], x, inputs)
    states = []
    for depth, (layer, after) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
        attended = attend(depth, finish(_quantized_product(layer.qkv, rows, x.dtype)))
        sums = _quantized_product(layer.o, quantize_rows(attended), x.dtype)
        rows, x = quantize_normed(sums, x, Norm(layer.post_norm, layer.eps))
        gate_up = finish(_quantized_product(layer.gate_up, rows, x.dtype))
        sums = _quantized_product(layer.down, quantize_gated(gate_up), x.dtype)
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


def _quantized_product(projection: Projection, rows: Quantized, dtype: torch.dtype) -> Sums:
    weight, bias, scales, _ = projection
    assert scales is not None
    return product(rows, weight, scales, bias, dtype)


def _fused(
    projection: Projection,
    x: Tensor,  # [N, I]
    policy: Policy,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    weight, bias, *_ = projection
    x, norm = _norm_left_to(weight, x, norm, policy)
    return fused_linear(x, weight, bias, norm=norm, residual=residual, gated=gated, policy=policy)


def _norm_left_to(
    weight: Tensor, x: Tensor, norm: Norm | None, policy: Policy
) -> tuple[Tensor, Norm | None]:
    """What a product reads, and the norm that is left to it."""
    if norm is None or policy.norms_inside(x, weight):
        return x, norm
    return rms_norm(x, *norm), None


def _linear(projection: Projection, x: Tensor) -> Tensor:
    weight, bias, *_ = projection
    return F.linear(x, weight, bias)

"""A model's layers as one call of kernels, where those may stand in for the layers' modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from peagle.kernels.cpu.layers import LayersKernel, fits_kernel, kernel_takes, layers_function
from peagle.kernels.layer_tensors import LayerTensors, Projection
from peagle.kernels.policy import FAST, Policy, gpu_takes
from peagle.models.attention import Attention, CachedAttention, RowsAttention
from peagle.models.fp8 import Fp8Linear
from peagle.models.layers import (
    DecoderLayer,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SelfAttention,
)


class Layer(Protocol):
    """What every layer has from its attention on."""

    self_attn: SelfAttention
    post_attention_layernorm: RMSNorm
    mlp: GatedMLP


class _Bound(NamedTuple):
    """The layers' tensors where they lie now."""

    addresses: list[int]
    layers: list[LayerTensors]
    kernel: LayersKernel | None  # the CPU's, where it fits
    row_major: bool  # every matrix: as the GPU's kernels read it


class FusedLayers:
    """Beside the modules, not instead of them: `__call__` gives None where they must run.

    Modules are looked up once, because the lookups cost as much as the layer. Before each call
    the parameters' addresses are compared, so weights that were replaced or moved are found
    again; a submodule that was replaced is not, nor is a packed weight, and hooks of submodules do
    not run. After `bind` nothing is compared any more.
    """

    def __init__(
        self, layers: Sequence[Layer], rotary: RotaryEmbedding, policy: Policy = FAST
    ) -> None:
        self._layers = layers
        self._rotary = rotary
        self._policy = policy
        self._bound = _Bound([], [], None, row_major=False)
        self._is_final = False

    def bind(self, policy: Policy) -> None:
        """To the weights where they lie now, for good, and to the kernels that the policy names.
        A batch-invariant policy has no other form to fall back to."""
        self._policy, self._is_final = policy, False
        bound = self._current()
        assert bound.row_major or not policy.batch_invariant
        self._is_final = True

    def __call__(
        self,
        x: Tensor,  # [N, H]
        inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
        positions: Tensor,  # [N]
        attention: Attention,
        kept_layers: Sequence[int] = (),  # counted from 1
    ) -> list[Tensor] | None:
        """-> the outputs [N, H] of all layers; only the kept ones' and the last may be read."""
        if not (self.may_run(x, attention) and isinstance(attention, CachedAttention)):
            return None
        if isinstance(attention, RowsAttention):
            return self._on_gpu(x, inputs, attention)
        place = attention.kernel_place(self._layers[0].self_attn.num_heads)
        kernel = self._current().kernel if place else None
        if kernel is None or place is None:
            return None
        return kernel(x, inputs, self._rotary(positions, x.dtype), place, kept_layers)

    @staticmethod
    def may_run(x: Tensor, attention: Attention) -> bool:
        """False wherever gradients, another device or another cache leave no doubt."""
        if isinstance(attention, RowsAttention):
            return gpu_takes(x)
        return isinstance(attention, CachedAttention) and kernel_takes(x)

    def __reduce__(
        self,
    ) -> tuple[type[FusedLayers], tuple[Sequence[Layer], RotaryEmbedding, Policy]]:
        # A copy is bound to its own weights later.
        return FusedLayers, (self._layers, self._rotary, self._policy)

    def _on_gpu(
        self, x: Tensor, inputs: Tensor | None, attention: RowsAttention
    ) -> list[Tensor] | None:
        from peagle.kernels.gpu.layers import run_layers

        bound, tables = self._current(), (self._rotary.cos, self._rotary.sin)
        if not bound.row_major:
            return None
        # The kernels look the angles up themselves, unrounded: no gather before the layers.
        assert all(table.dtype is torch.float32 for table in tables)
        cache = attention.keys, attention.values
        return run_layers(bound.layers, x, inputs, *tables, attention.rows, *cache, self._policy)

    @cached_property
    def _owners(self) -> list[tuple[dict[str, Any], str]]:
        """Each parameter's dictionary and name: what stands there may be replaced."""
        modules = [module for layer in self._layers for module in _modules(layer)]
        return [(module._parameters, name) for module in modules for name in module._parameters]

    def _current(self) -> _Bound:
        if self._is_final:
            return self._bound
        found = [parameters.get(name) for parameters, name in self._owners]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in found]
        bound = self._bound
        if addresses != bound.addresses:
            layers = [_tensors(layer) for layer in self._layers]
            row_major = all(t is None or t.is_contiguous() for t in found)
            bound = _Bound(addresses, layers, _bind(layers), row_major)
            self._bound = bound  # at once: another thread may read it
        return bound


def _bind(layers: Sequence[LayerTensors]) -> LayersKernel | None:
    if not all(map(fits_kernel, layers)):
        return None
    function = layers_function()
    return None if function is None else LayersKernel(function, layers)


def _modules(layer: Layer) -> list[nn.Module]:
    assert isinstance(layer, nn.Module)
    return list(layer.modules())


def _tensors(layer: Layer) -> LayerTensors:
    attn, mlp, post_norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    # A drafter's first layer norms its two inputs itself.
    input_norm = layer.input_layernorm.weight if isinstance(layer, DecoderLayer) else None
    return LayerTensors(
        input_norm,
        post_norm.weight,
        None if attn.q_norm is None else attn.q_norm.weight,
        None if attn.k_norm is None else attn.k_norm.weight,
        _projection(attn.qkv_proj),
        _projection(attn.o_proj),
        _projection(mlp.gate_up_proj),
        _projection(mlp.down_proj),
        attn.window,
        post_norm.eps,
    )


def _projection(linear: Linear | Fp8Linear) -> Projection:
    if isinstance(linear, Fp8Linear):
        return Projection(linear.weight, linear.bias, linear.scales)
    packed = linear.packed
    return Projection(packed.panels if packed else linear.weight, linear.bias, packed=packed)

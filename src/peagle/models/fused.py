"""A model's layers as one call of the CPU kernel, where it may stand in for their modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor, nn

from peagle.kernels.layer import (
    LayersKernel,
    LayerTensors,
    Projection,
    kernel_takes,
    layers_function,
)
from peagle.models.attention import Attention, CachedAttention
from peagle.models.layers import DecoderLayer, GatedMLP, RMSNorm, Rotation, SelfAttention


class Layer(Protocol):
    """What every layer has from its attention on."""

    self_attn: SelfAttention
    post_attention_layernorm: RMSNorm
    mlp: GatedMLP


class FusedLayers:
    """Beside the modules, not instead of them: `__call__` gives None where they must run.

    Modules are looked up once, because the lookups cost as much as the layer. Before each call
    the parameters' addresses are compared, so weights that were replaced or moved are found
    again; a submodule that was replaced is not, and hooks of submodules do not run.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._bound: tuple[list[int], LayersKernel | None] = ([], None)

    def __call__(
        self,
        x: Tensor,  # [N, H]
        inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
        rotation: Rotation,
        attention: Attention,
    ) -> Tensor | None:
        """-> [L, N, H]: the output of every layer."""
        if not (self.may_run(x, attention) and isinstance(attention, CachedAttention)):
            return None
        place = attention.kernel_place(self._layers[0].self_attn.num_heads)
        kernel = self._current() if place else None
        return None if kernel is None or place is None else kernel(x, inputs, rotation, place)

    @staticmethod
    def may_run(x: Tensor, attention: Attention) -> bool:
        """False wherever gradients, another device or another cache leave no doubt."""
        return isinstance(attention, CachedAttention) and kernel_takes(x)

    def __reduce__(self) -> tuple[type[FusedLayers], tuple[Sequence[Layer]]]:
        return FusedLayers, (self._layers,)  # a copy is bound to its own weights later

    @cached_property
    def _owners(self) -> list[tuple[dict[str, Any], str]]:
        """Each parameter's dictionary and name: what stands there may be replaced."""
        modules = [module for layer in self._layers for module in _modules(layer)]
        return [(module._parameters, name) for module in modules for name in module._parameters]

    def _current(self) -> LayersKernel | None:
        found = [parameters[name] for parameters, name in self._owners]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in found]
        known, kernel = self._bound
        if addresses != known:
            kernel = _bind([_tensors(layer) for layer in self._layers])
            self._bound = addresses, kernel  # at once: another thread may read it
        return kernel


def _bind(layers: Sequence[LayerTensors]) -> LayersKernel | None:
    function = layers_function()
    fits = all(layer.fits for layer in layers)
    return LayersKernel(function, layers) if function is not None and fits else None


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
        Projection(attn.qkv_proj.weight, attn.qkv_proj.bias),
        Projection(attn.o_proj.weight, attn.o_proj.bias),
        Projection(mlp.gate_up_proj.weight, mlp.gate_up_proj.bias),
        Projection(mlp.down_proj.weight, mlp.down_proj.bias),
        attn.window,
        post_norm.eps,
    )

"""A target's linear layers with 8-bit weights: half the bytes of bfloat16 to read for each step.

Embeddings, the output table, norms and the drafter stay as they are. The quantised target is a
model of its own: speculation is lossless relative to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peagle.errors import ConfigError
from peagle.kernels.policy import gpu_takes
from peagle.kernels.reference.fp8 import quantize_rows, scaled_linear
from peagle.models.layers import DecoderLayer

if TYPE_CHECKING:
    from peagle.models.target import TargetModel

MULTIPLE = 16  # of inputs and outputs: what the GPU's 8-bit product takes
LEAST_CAPABILITY = (8, 9)  # Ada, Hopper and newer have one


class Fp8Linear(nn.Module):
    """weight [O, I] with a scale for each output; inputs get one for each row as they come."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scales = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)  # [O, I]
        self.scales = nn.Parameter(scales, requires_grad=False)  # [O, 1] float32
        self.bias = linear.bias
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        if gpu_takes(x):
            from peagle.kernels.gpu import fp8

            return fp8.scaled_linear(x, self.weight, self.scales, self.bias)
        return scaled_linear(x, self.weight, self.scales, self.bias)


def quantize_linears(target: TargetModel) -> None:
    """Replaces each layer's four products, one at a time: no second copy of the model is made."""
    if not target.config.has_standard_layers:
        raise ConfigError(
            "quantization=fp8 has no kernels for this target's layers", hint="drop it"
        )
    places = [place for layer in target.layers for place in _linears(layer)]
    for block, name in places:
        _check_sizes(name, block.get_submodule(name))
    for block, name in places:
        linear = block.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(block, name, Fp8Linear(linear))
        # Whoever still holds the old module must neither compute with it nor keep its memory.
        linear.register_parameter("weight", None)


def check_gpu(device: torch.device) -> None:
    """Raises ConfigError if the GPU has no 8-bit product. A CPU needs none."""
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, has = (".".join(map(str, c)) for c in (LEAST_CAPABILITY, capability))
        raise ConfigError(
            f"quantization=fp8 needs a GPU of compute capability {least}, this one has {has}",
            hint="drop it",
        )


def _linears(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    assert isinstance(layer, DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    return [
        (attention, "qkv_proj"),
        (attention, "o_proj"),
        (mlp, "gate_up_proj"),
        (mlp, "down_proj"),
    ]


def _check_sizes(name: str, linear: nn.Module) -> None:
    """On a CPU too: a model that is quantised here must run quantised there."""
    assert isinstance(linear, nn.Linear), f"{name} is quantised already"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        raise ConfigError(
            f"quantization=fp8 takes sizes that are multiples of {MULTIPLE}, but {name} is "
            f"{linear.out_features} x {linear.in_features}",
            hint="drop it for this target",
        )

"""Which kernels a model runs with: decided once, after its weights are loaded, moved and quantised.

On a CPU its weights are stored anew, in the order in which the kernels read them.

A model that nobody has bound, as in training, runs with the FAST policy and looks at each call
whether its weights are still where they were.
"""

from __future__ import annotations

from torch import Tensor, nn

from peagle.errors import ConfigError
from peagle.kernels.cpu.linear import PackedWeight, packed
from peagle.kernels.policy import BATCH_INVARIANT, FAST
from peagle.models.eagle import EagleNetwork
from peagle.models.experts import Experts
from peagle.models.fp8 import Fp8Linear
from peagle.models.layers import Linear
from peagle.models.target import TargetModel


def bind_kernels(model: TargetModel | EagleNetwork, *, batch_invariant: bool = False) -> None:
    """For a target with the engine's own option, for a drafter without: its rows decide nothing."""
    if batch_invariant:
        _check_batch_invariant(model)
    pack_weights(model)
    model.bind(BATCH_INVARIANT if batch_invariant else FAST)


def pack_weights(model: nn.Module) -> None:
    """Each weight of a product, where there is a kernel that wants it so; one at a time, so that no
    second copy of the model is made. A table that the weight was tied to stays what it was."""
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is None:
            weight = packed(module.weight.detach())
            if isinstance(weight, PackedWeight):
                del module.weight
                module.packed = weight
        elif isinstance(module, Experts):
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(module, name)
                weight = packed(weight.detach()) if isinstance(weight, Tensor) else weight
                if isinstance(weight, PackedWeight):
                    delattr(module, name)  # as a parameter
                    setattr(module, name, weight)


def _check_batch_invariant(model: nn.Module) -> None:
    if isinstance(model, TargetModel) and not model.config.has_standard_layers:
        raise ConfigError(
            "batch_invariant has no kernels for this target's layers", hint="drop batch_invariant"
        )
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ConfigError(
            "batch_invariant cannot be combined with 8-bit weights", hint="drop quantization=fp8"
        )
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ConfigError(
            f"batch_invariant is an option of the GPU's kernels, and the model is on {device}",
            hint="drop it; on a CPU steps in float32 are batch-invariant without it as a rule",
        )

"""Which kernels a model runs with: decided once, after its weights are loaded, moved and quantised.

A model that nobody has bound, as in training, runs with the FAST policy and looks at each call
whether its weights are still where they were.
"""

from __future__ import annotations

from torch import nn

from peagle.errors import ConfigError
from peagle.kernels.policy import BATCH_INVARIANT, FAST
from peagle.models.eagle import EagleNetwork
from peagle.models.fp8 import Fp8Linear
from peagle.models.target import TargetModel


def bind_kernels(model: TargetModel | EagleNetwork, *, batch_invariant: bool = False) -> None:
    """For a target with the engine's own option, for a drafter without: its rows decide nothing."""
    if batch_invariant:
        _check_batch_invariant(model)
    model.bind(BATCH_INVARIANT if batch_invariant else FAST)


def _check_batch_invariant(model: nn.Module) -> None:
    if isinstance(model, TargetModel) and not model.config.has_standard_layers:
        raise ConfigError(
            "batch_invariant has no kernels for this target's layers", hint="drop batch_invariant"
        )
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ConfigError("batch_invariant has no 8-bit products", hint="drop quantization=fp8")
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ConfigError(
            f"batch_invariant is an option of the GPU's kernels, and the model is on {device}",
            hint="drop it; on a CPU steps of up to 32 rows are batch-invariant without it",
        )

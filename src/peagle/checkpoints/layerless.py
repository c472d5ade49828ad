"""A target without its layers: the embedding, the final norm and the output table.

Enough to train a head where another process computes the hidden states; a target of 140 GB
then costs a few. Mixtures of experts may be loaded so, for only their layers differ from ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.checkpoints.files import iter_tensors
from peagle.checkpoints.references import load_config
from peagle.checkpoints.weights import load_weights
from peagle.errors import ModelError
from peagle.models.config import SUPPORTED_MODEL_TYPES, DecoderConfig
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel

# Their embedding is not scaled and their final norm is plain RMSNorm.
EXPERT_MODEL_TYPES = ("gpt_oss", "mixtral", "qwen3_moe")
STORED = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def load_layerless(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """A TargetModel with an empty `layers`: asking it for aux_hidden_states is an error."""
    config = decoder_sizes(load_config(folder))
    with on_meta():
        target = TargetModel(config)
        target.layers = nn.ModuleList()
    target.rotary.to(device)
    tensors = _stored(folder, config.tie_word_embeddings)
    load_weights(target, tensors, error=ModelError, source=str(folder), dtype=dtype, device=device)
    return target.eval()


def decoder_sizes(config: Any) -> DecoderConfig:
    """The sizes that a head takes from its target; of experts, those of one of them."""
    if config.model_type in SUPPORTED_MODEL_TYPES:
        return DecoderConfig.from_transformers(config)
    if config.model_type not in EXPERT_MODEL_TYPES:
        known = ", ".join((*SUPPORTED_MODEL_TYPES, *EXPERT_MODEL_TYPES))
        raise ModelError(
            f"the final norm of model type {config.model_type!r} is not known",
            hint=f"known: {known}",
        )
    return DecoderConfig.sizes_of(config)


def _stored(folder: Path, tied: bool) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in iter_tensors(folder):
        if name in STORED and not (tied and name == "lm_head.weight"):
            yield name.removeprefix("model."), tensor

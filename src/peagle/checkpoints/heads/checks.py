"""Heads that vLLM would refuse late or run wrongly: it takes zeros for a missing tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.checkpoints.files import read_json, tensor_names
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.layouts import CONFIG, ForeignLayout, layout_of
from peagle.checkpoints.references import load_config
from peagle.checkpoints.weights import load_weights, split_weights
from peagle.errors import HeadError
from peagle.models.eagle import EagleNetwork, SharedTables
from peagle.models.head_config import HeadConfig

NUM_AUX_HIDDEN_STATES = 3  # hard-coded in older versions of vLLM
IN_THE_TABLE = "mask_embedding"  # vLLM's layouts keep it as a row of embed_tokens


def check_head(head: Path, target: Path | None) -> None:
    """Raises HeadError for a head in one of vLLM's layouts that vLLM would run wrongly.

    Names alone: vLLM looks at shapes itself. `target` None: it does not lie on this machine.
    """
    config = read_head_config(head)
    layout = layout_of(read_json(head / CONFIG), str(head / CONFIG))
    assert layout != "native", "a native head is exported first"
    check_vllm_runs(config, load_config(target).get_text_config() if target else None, layout)
    stored = {name.replace("midlayer.", "layers.0.") for name in tensor_names(head)}
    wanted = set(split_weights(_meta_network(config))) - {IN_THE_TABLE}
    missing = sorted(wanted - stored)
    if missing:
        raise HeadError(f"{head} lacks {', '.join(missing)}", hint="copy or download it again")


def check_vllm_runs(config: HeadConfig, target: Any | None, layout: ForeignLayout) -> None:
    """Raises HeadError for a head that vLLM would refuse, or worse, run wrongly."""
    if target is not None:
        config.check_fits(target)
    layers = config.aux_hidden_state_layer_ids
    if len(layers) != NUM_AUX_HIDDEN_STATES:
        raise HeadError(
            f"vLLM runs heads with {NUM_AUX_HIDDEN_STATES} aux hidden states, "
            f"this one reads {list(layers)}"
        )
    if list(layers) != sorted(set(layers)):
        raise HeadError(
            "vLLM hands aux hidden states over in the order of the layers, each once; "
            f"this head reads {list(layers)}",
            hint="train it with increasing aux_hidden_state_layer_ids",
        )
    if layout == "speculators" and config.norm_before_fc and config.fc_norm:
        raise HeadError("the speculators layout has norm_before_fc or fc_norm, not both")


def check_complete(config: HeadConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """The checks of loading, on the meta device: nothing is copied."""
    load_weights(
        _meta_network(config),
        tensors.items(),
        error=HeadError,
        source=str(folder),
        dtype=torch.float32,
        device=torch.device("meta"),
    )


def _meta_network(config: HeadConfig) -> EagleNetwork:
    with torch.device("meta"):
        rows, size = config.vocab_size, config.hidden_size
        tables = SharedTables(nn.Embedding(rows, size), nn.Linear(size, rows, bias=False))
        return EagleNetwork(config, tables)

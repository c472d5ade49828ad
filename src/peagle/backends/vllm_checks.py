"""What vLLM would not notice: a head that lacks a tensor runs there with zeros in its place."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from peagle.checkpoints.exporting import check_vllm_runs
from peagle.checkpoints.files import read_json, tensor_names
from peagle.checkpoints.heads import read_head_config
from peagle.checkpoints.layouts import CONFIG, layout_of
from peagle.checkpoints.references import load_config
from peagle.checkpoints.weights import split_weights
from peagle.errors import HeadError
from peagle.models.eagle import EagleNetwork, SharedTables
from peagle.models.head_config import HeadConfig

IN_THE_TABLE = "mask_embedding"  # vLLM's layouts keep it as a row of embed_tokens


def check_head(head: Path, target: Path) -> None:
    """Raises HeadError for a head in one of vLLM's layouts that vLLM would run wrongly.

    Names alone: vLLM looks at shapes itself.
    """
    config = read_head_config(head)
    layout = layout_of(read_json(head / CONFIG), str(head / CONFIG))
    assert layout != "native", "a native head is exported first"
    check_vllm_runs(config, load_config(target).get_text_config(), layout)
    stored = {name.replace("midlayer.", "layers.0.") for name in tensor_names(head)}
    missing = sorted(_wanted(config) - stored)
    if missing:
        raise HeadError(f"{head} lacks {', '.join(missing)}", hint="copy or download it again")


def _wanted(config: HeadConfig) -> set[str]:
    with torch.device("meta"):
        rows, size = config.vocab_size, config.hidden_size
        tables = SharedTables(nn.Embedding(rows, size), nn.Linear(size, rows, bias=False))
        network = EagleNetwork(config, tables)
    return set(split_weights(network)) - {IN_THE_TABLE}

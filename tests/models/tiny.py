"""Tiny random models whose every parameter counts, and cache tables that are not in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.models.config import DecoderConfig
from peagle.models.drafter import CacheLayout
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.target import TargetModel

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": 59,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """No zeros and no ones: a bias or a norm that is left out must show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = "norm" in name
            parameter.copy_(1 + noise if is_norm else noise)


def reference(config: PretrainedConfig, seed: int = 0) -> Any:
    """A transformers model with random weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    return model.eval()


def save_reference(folder: Path, config: PretrainedConfig | None = None, **options: Any) -> Any:
    model = reference(config or LlamaConfig(**SIZES))
    model.save_pretrained(folder, **options)
    return model


def target(dtype: torch.dtype = torch.float64, **changes: Any) -> TargetModel:
    config = LlamaConfig(**SIZES | changes)
    model = TargetModel(DecoderConfig.from_transformers(config)).to(dtype)
    randomise(model)
    return model.requires_grad_(False).eval()


def head_config(method: str = "p-eagle", **changes: Any) -> HeadConfig:
    fields: dict[str, Any] = {
        "method": method,
        "target_model": "tiny",
        "target_hidden_size": 32,
        "target_num_hidden_layers": 4,
        "vocab_size": 59,
        "aux_hidden_state_layer_ids": (1, 2, 4),
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2 if method == "p-eagle" else 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(ROPE),
        "draft_vocab_size": 59,
        "max_speculative_tokens": 8,
        "num_speculative_tokens": 5,
    }
    return HeadConfig(**fields | changes)


def head(
    model: TargetModel, method: str = "p-eagle", seed: int = 1, **changes: Any
) -> EagleNetwork:
    config = head_config(method, **changes)
    network = EagleNetwork(config, shared_tables(model)).to(model.embed_tokens.weight.dtype)
    randomise(network, seed)
    if config.reduced_vocabulary:
        shuffled = torch.randperm(59, generator=torch.Generator().manual_seed(seed))
        network.target_ids = shuffled[: config.draft_vocab_size]
    return network.requires_grad_(False).eval()


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(59, (count,), generator=torch.Generator().manual_seed(seed))


def poisoned_cache(
    layout: CacheLayout, num_slots: int, dtype: torch.dtype = torch.float64
) -> PagedKVCache:
    """NaN everywhere: an entry that is read before it was written spoils the result."""
    cache = PagedKVCache(layout, num_slots, dtype, torch.device("cpu"))
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


def shuffled_tables(
    lengths: Sequence[int], block_size: int = 4, seed: int = 0
) -> tuple[list[BlockTable], int]:
    """Tables of blocks that lie anywhere, and the number of slots they need in all.

    The first sequence's blocks follow each other, so that both ways of reading are taken.
    """
    counts = [-(-length // block_size) for length in lengths]
    first, others = counts[0], list(range(counts[0], sum(counts)))
    random.Random(seed).shuffle(others)
    tables = []
    for number, count in enumerate(counts):
        blocks = list(range(first)) if number == 0 else [others.pop() for _ in range(count)]
        table = BlockTable(block_size, range(0))
        for block in blocks:
            table.append(block)
        tables.append(table)
    return tables, sum(counts) * block_size

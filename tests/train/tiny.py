"""A tiny random target, heads for it, and a small language that a head can learn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from peagle.data.dataset import DatasetWriter, Row
from peagle.data.packing import PackedRow, lay_out
from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.row_layouts import ExactLayout, PagedModel
from peagle.kernels.step_ops import step_ops
from peagle.models.config import DecoderConfig
from peagle.models.drafter import DraftBatch, NetworkDrafter, Packing
from peagle.models.eagle import EagleNetwork, initialise, shared_tables
from peagle.models.head_config import HeadConfig
from peagle.models.output import OutputRows
from peagle.models.target import TargetModel
from peagle.train.recipe import Recipe, recipe_from

VOCAB = 40
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def target(dtype: torch.dtype = torch.float64, seed: int = 0, head_dim: int = 8) -> TargetModel:
    llama = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        rope_parameters=ROPE,
    )
    torch.manual_seed(seed)
    model = TargetModel(DecoderConfig.from_transformers(llama)).to(dtype)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0.0, 0.25)
    return model.requires_grad_(False)


def head_config(method: str = "p-eagle", **changes: Any) -> HeadConfig:
    fields: dict[str, Any] = {
        "method": method,
        "target_model": "tiny",
        "target_hidden_size": 16,
        "target_num_hidden_layers": 6,
        "vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": (2, 3, 5),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2 if method == "p-eagle" else 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "draft_vocab_size": VOCAB,
        "max_speculative_tokens": 4,
        "num_speculative_tokens": 3,
    }
    return HeadConfig(**fields | changes)


def head(
    model: TargetModel, method: str = "p-eagle", seed: int = 0, **changes: Any
) -> EagleNetwork:
    network = EagleNetwork(head_config(method, **changes), shared_tables(model))
    network.to(model.embed_tokens.weight.dtype)
    initialise(network, model, torch.Generator().manual_seed(seed))
    with torch.no_grad():  # larger than a training start, so that mistakes show
        for weight in network.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return network


def packed(
    lengths: list[int], capacity: int, seed: int = 0, prompt: int = 3, share: float = 1.0
) -> PackedRow:
    """Random documents; tokens past the prompt are supervised with probability `share`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]
    masks = [
        (torch.arange(n) >= prompt) & (torch.rand(n, generator=generator) < share) for n in lengths
    ]
    return lay_out(tokens, masks, list(range(len(lengths))), capacity)


def counting_language(num_rows: int, length: int, seed: int = 0) -> list[Tensor]:
    """Documents that count upward by a step which their first tokens reveal."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCAB, (num_rows, 1), generator=generator)
    step = torch.randint(1, 4, (num_rows, 1), generator=generator)
    return list((start + step * torch.arange(length)) % VOCAB)


def propose(
    drafter: NetworkDrafter,
    tokens: Tensor,
    aux_hidden_states: Tensor,
    k: int,
    sample: Callable[[OutputRows, int, Packing], Tensor],
) -> list[int]:
    """k drafts behind the tokens [n] of one sequence, of which [n - 1] have hidden states."""
    assert drafter.cache_layout is not None
    num_rows, block = len(tokens) - 1, BlockTable(len(tokens) + k, range(0))
    block.append(0)
    cache = PagedKVCache(
        drafter.cache_layout, block.capacity, aux_hidden_states.dtype, aux_hidden_states.device
    )
    model, layout = PagedModel(cache, block.capacity - 1), ExactLayout([block])
    batch = DraftBatch(
        slots=torch.tensor([0]),
        tokens=tokens[None, 1:],
        aux_hidden_states=aux_hidden_states[:num_rows],
        starts=torch.tensor([0]),
        num_real=torch.tensor([num_rows]),
        num_rows=torch.tensor([num_rows + k - 1]),
        num_drafts=torch.tensor([k]),
        depth=k,
        prompt=None,
        attend=lambda items: layout.rows(model, items, 1),
        pack=layout.pack,
        pack_depths=partial(layout.pack_depths, torch.tensor([k])),
        sample=sample,
        ops=step_ops(aux_hidden_states.device),
    )
    drafts: list[int] = drafter.propose(batch)[0].tolist()
    return drafts


def recipe(folder: Path, **sections: dict[str, Any]) -> Recipe:
    """A recipe for the tiny target over `folder`/data, run in `folder`/run."""
    method = sections.get("head", {}).get("method", "p-eagle")
    options: dict[str, dict[str, Any]] = {
        "head": {
            "method": method,
            "num_hidden_layers": 2 if method == "p-eagle" else 1,
            "max_speculative_tokens": 4,
            "num_speculative_tokens": 3,
            "aux_hidden_state_layer_ids": [2, 3, 5],
        },
        "data": {"path": str(folder / "data"), "tokens_per_row": 128, "held_out_share": 0.1},
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"steps": 4},
        "run": {"folder": str(folder / "run"), "device": "cpu", "evaluate_every": 0},
    }
    for name, values in sections.items():
        options[name] = options.get(name, {}) | values
    return recipe_from(options)


def write_dataset(folder: Path, documents: list[Tensor], prompt: int = 3) -> None:
    writer = DatasetWriter(folder, {"target": "tiny"}, rows_per_shard=16)
    for number, tokens in enumerate(documents):
        mask = (torch.arange(len(tokens)) >= prompt).int()
        writer.add(Row(f"row-{number}", tokens, mask, category="ab"[number % 2]))
    writer.flush()

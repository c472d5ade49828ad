"""What a tiny head is trained on: packed rows, a language that it can learn, a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.data.dataset import DatasetWriter, Row
from peagle.data.packing import PackedRow, lay_out
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.train.recipe import Recipe, recipe_from

from .models import DEEP

VOCAB: int = DEEP.target["vocab_size"]


def trainable_head(
    target: TargetModel, method: str = "p-eagle", seed: int = 1, **changes: Any
) -> EagleNetwork:
    return DEEP.make_head(target, method, seed, **changes).requires_grad_().train()


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

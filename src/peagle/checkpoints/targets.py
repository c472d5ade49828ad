"""A model folder -> the native target, ready to run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.decoder_configs import read_decoder_config
from peagle.checkpoints.files import iter_tensors, read_json
from peagle.checkpoints.weights import load_weights
from peagle.errors import ModelError
from peagle.models.layers import lay_out_for_cpu
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel


def load_target(folder: Path, *, dtype: torch.dtype, device: torch.device) -> TargetModel:
    config = read_decoder_config(folder)
    with on_meta():
        target = TargetModel(config)
    if device.type == "cpu":
        lay_out_for_cpu(target)
    target.rotary.to(device)
    load_weights(
        target,
        _stored(folder, config.tie_word_embeddings),
        error=ModelError,
        source=str(folder),
        dtype=dtype,
        device=device,
    )
    return target.eval()


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, which may be several, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = read_json(folder / name).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _stored(folder: Path, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors under our names; leaves out what old checkpoints store needlessly."""
    tables = []
    for name, tensor in iter_tensors(folder):
        if tied and name in ("model.embed_tokens.weight", "lm_head.weight"):
            tables.append(tensor)
        is_tied_copy = tied and name == "lm_head.weight"
        if not is_tied_copy and not name.endswith("rotary_emb.inv_freq"):
            yield name.removeprefix("model."), tensor
    if len(tables) == 2 and not torch.equal(*tables):  # transformers would not tie them
        raise ModelError(
            f"{folder} has an lm_head.weight of its own, but its config.json ties it",
            hint='set "tie_word_embeddings" to false in config.json',
        )

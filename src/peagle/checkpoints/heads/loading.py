"""A head's folder, in any layout -> the network bound to its target; and back, in our layout.

Ours is config.json and model.safetensors. Tensors have the names of vLLM's raw layout (`fc.weight`,
`layers.0.self_attn.q_proj.weight`, ...) plus `mask_embedding`. A compact head holds neither
`embed_tokens` nor `lm_head`: the target's serve. A reduced vocabulary is `d2t`: target id =
draft id + d2t[draft id]. A correction is in correction.safetensors, so that the head beside it
stays what it was. `heads/layouts.py` names the other layouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.checkpoints.files import WEIGHTS
from peagle.checkpoints.heads.config import as_head_errors, read_head_config
from peagle.checkpoints.heads.layouts import CONFIG, FORMAT, FORMAT_VERSION
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.heads.tensors import (
    CORRECTED_HEAD,
    CORRECTION,
    CORRECTION_PREFIX,
    fingerprint,
    read_head_tensors,
    target_ids,
)
from peagle.checkpoints.targets import tables_of
from peagle.checkpoints.weights import load_weights, split_weights
from peagle.errors import HeadError
from peagle.files import atomic_folder
from peagle.models.eagle import EagleNetwork, shared_tables
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel


def load_head(
    reference: str, target: TargetModel, *, dtype: torch.dtype, device: torch.device
) -> EagleNetwork:
    """A head bound to its target, after checking that they fit."""
    folder = resolve_head(reference)
    config = read_head_config(folder)
    config.check_fits(target.config)
    with on_meta():
        network = EagleNetwork(config, shared_tables(target))
    network.rotary.to(device)
    with as_head_errors():
        tensors = read_head_tensors(folder, config, tables_of(target))
    network.target_ids = target_ids(config, tensors.pop("d2t", None), folder).to(device)
    load_weights(
        network, tensors.items(), error=HeadError, source=str(folder), dtype=dtype, device=device
    )
    return network.eval()


def save_head(network: EagleNetwork, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes a head atomically; `dtype` casts the weights (bfloat16 halves the file)."""
    with atomic_folder(folder) as temporary:
        tensors = dict(_tensors(network, dtype))
        corrections = {n: tensors.pop(n) for n in list(tensors) if n.startswith(CORRECTION_PREFIX)}
        save_file(tensors, temporary / WEIGHTS)
        if corrections:
            metadata = {CORRECTED_HEAD: fingerprint(tensors)}
            save_file(corrections, temporary / CORRECTION, metadata=metadata)
        config = {FORMAT: FORMAT_VERSION, **dataclasses.asdict(network.config)}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _tensors(network: EagleNetwork, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in split_weights(network).items():
        yield name, tensor.to("cpu", dtype)
    if network.config.reduced_vocabulary:
        ids = network.target_ids.cpu()
        yield "d2t", ids - torch.arange(len(ids))

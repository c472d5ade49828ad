"""Heads by name and by folder: found, loaded in any layout, written in ours.

Ours is config.json and model.safetensors. Tensors have the names of vLLM's raw layout (`fc.weight`,
`layers.0.self_attn.q_proj.weight`, ...) plus `mask_embedding`. A compact head holds neither
`embed_tokens` nor `lm_head`: the target's serve. A reduced vocabulary is `d2t`: target id =
draft id + d2t[draft id]. layouts.py names the other layouts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from peagle.checkpoints.files import WEIGHTS, read_json
from peagle.checkpoints.head_configs import as_head_errors, read_head_config
from peagle.checkpoints.layouts import CONFIG, FORMAT, FORMAT_VERSION
from peagle.checkpoints.references import is_hub_id, resolve_model
from peagle.errors import HeadError
from peagle.files import atomic_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from peagle.models.eagle import EagleNetwork
    from peagle.models.target import TargetModel

__all__ = [
    "CONFIG",
    "FORMAT",
    "HeadInfo",
    "list_heads",
    "load_head",
    "read_head_config",
    "resolve_head",
    "save_head",
]


class HeadInfo(NamedTuple):
    """What a listing shows of a head; read without torch."""

    name: str
    path: Path
    method: str
    target: str
    num_speculative_tokens: int


def list_heads() -> list[HeadInfo]:
    """The heads that ship with the package."""
    shipped = Path(str(resources.files("peagle") / "heads"))
    folders = sorted(f.parent for f in shipped.glob(f"*/{CONFIG}"))
    return [_info(folder) for folder in folders]


def resolve_head(reference: str) -> Path:
    """A shipped head's name, a folder or a Hugging Face id -> the folder."""
    shipped = {head.name: head.path for head in list_heads()}
    if reference in shipped:
        return shipped[reference]
    folder = Path(reference).expanduser()
    if not os.path.isfile(folder / CONFIG):  # Path.is_file raises on names too long to exist
        if is_hub_id(reference):
            with as_head_errors():
                return resolve_model(reference)
        names = ", ".join(shipped) or "none ship yet"
        raise HeadError(
            f"no head {reference!r}",
            hint=f"give a folder with {CONFIG}, a Hugging Face id, or a shipped head ({names})",
        )
    return folder


def load_head(
    reference: str, target: TargetModel, *, dtype: torch.dtype, device: torch.device
) -> EagleNetwork:
    """A head bound to its target, after checking that they fit."""
    from peagle.checkpoints.importing import read_head_tensors, target_ids
    from peagle.checkpoints.target_tables import tables_of
    from peagle.checkpoints.weights import load_weights
    from peagle.models.eagle import EagleNetwork, shared_tables
    from peagle.models.layers import lay_out_for_cpu
    from peagle.models.meta import on_meta

    folder = resolve_head(reference)
    config = read_head_config(folder)
    config.check_fits(target.config)
    with on_meta():
        network = EagleNetwork(config, shared_tables(target))
    if device.type == "cpu":
        lay_out_for_cpu(network)
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
    from safetensors.torch import save_file

    with atomic_folder(folder) as temporary:
        save_file(dict(_tensors(network, dtype)), temporary / WEIGHTS)
        config = {FORMAT: FORMAT_VERSION, **dataclasses.asdict(network.config)}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        shutil.copymode(temporary / CONFIG, temporary / WEIGHTS)  # others may read it too


def _tensors(network: EagleNetwork, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    import torch

    from peagle.checkpoints.weights import split_weights

    for name, tensor in split_weights(network).items():
        yield name, tensor.to("cpu", dtype)
    if network.config.reduced_vocabulary:
        ids = network.target_ids.cpu()
        yield "d2t", ids - torch.arange(len(ids))


def _info(folder: Path) -> HeadInfo:
    options = read_json(folder / CONFIG)
    return HeadInfo(
        folder.name,
        folder,
        options["method"],
        options["target_model"],
        options["num_speculative_tokens"],
    )

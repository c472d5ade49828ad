"""Heads in our native format: a folder with config.json and model.safetensors.

Tensors have the names of vLLM's raw layout (`fc.weight`, `layers.0.self_attn.q_proj.weight`, ...)
plus `mask_embedding`. A compact head holds neither `embed_tokens` nor `lm_head`: the target's
serve. A reduced vocabulary is `d2t`: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from peagle.checkpoints.files import WEIGHTS, atomic_folder, iter_tensors, read_json
from peagle.errors import HeadError, ModelError, PeagleError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from peagle.models.eagle import EagleNetwork
    from peagle.models.head_config import HeadConfig
    from peagle.models.target import TargetModel

FORMAT = "peagle_format"
FORMAT_VERSION = 1
CONFIG = "config.json"


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
    """A shipped head's name or a folder -> the folder."""
    shipped = {head.name: head.path for head in list_heads()}
    if reference in shipped:
        return shipped[reference]
    folder = Path(reference).expanduser()
    if not os.path.isfile(folder / CONFIG):  # Path.is_file raises on names too long to exist
        names = ", ".join(shipped) or "none ship yet"
        raise HeadError(
            f"no head {reference!r}",
            hint=f"give a folder with {CONFIG}, or a shipped head ({names})",
        )
    return folder


def read_head_config(folder: Path) -> HeadConfig:
    from peagle.config import from_mapping
    from peagle.models.head_config import HeadConfig

    with _as_head_errors():
        options: dict[str, Any] = read_json(folder / CONFIG)
    version = options.pop(FORMAT, None)
    if version != FORMAT_VERSION:
        raise HeadError(
            f"{folder / CONFIG} is no native head of format {FORMAT_VERSION}",
            hint=f"it says {FORMAT}={version!r}",
        )
    kinds = get_type_hints(HeadConfig)
    for name, value in options.items():
        if name in kinds and not _fits(value, kinds[name]):
            raise HeadError(f"{folder / CONFIG}: {name} cannot be {json.dumps(value)}")
        options[name] = tuple(value) if isinstance(value, list) else value
    try:
        return from_mapping(HeadConfig, options, str(folder / CONFIG))
    except TypeError as error:  # a key is missing: dataclasses name it
        raise HeadError(f"{folder / CONFIG}: {str(error).split('__init__() ')[-1]}") from error
    except PeagleError as error:
        where = "" if CONFIG in error.message else f"{folder / CONFIG}: "
        raise HeadError(where + error.message, hint=error.hint) from error


def load_head(
    reference: str, target: TargetModel, *, dtype: torch.dtype, device: torch.device
) -> EagleNetwork:
    """A head bound to its target, after checking that they fit."""
    import torch

    from peagle.checkpoints.weights import load_weights
    from peagle.models.eagle import EagleNetwork, shared_tables
    from peagle.models.layers import lay_out_for_cpu

    folder = resolve_head(reference)
    config = read_head_config(folder)
    config.check_fits(target.config)
    with torch.device("meta"):
        network = EagleNetwork(config, shared_tables(target))
    network.rotary.to(device)
    with _as_head_errors():
        tensors = dict(iter_tensors(folder))
    network.target_ids = _target_ids(config, tensors.pop("d2t", None), folder).to(device)
    load_weights(
        network, tensors.items(), error=HeadError, source=str(folder), dtype=dtype, device=device
    )
    if device.type == "cpu":
        lay_out_for_cpu(network)
    return network.eval()


def save_head(network: EagleNetwork, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes a head atomically; `dtype` casts the weights (bfloat16 halves the file)."""
    from safetensors.torch import save_file

    with atomic_folder(folder) as temporary:
        save_file(dict(_tensors(network, dtype)), temporary / WEIGHTS)
        config = {FORMAT: FORMAT_VERSION, **dataclasses.asdict(network.config)}
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _tensors(network: EagleNetwork, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    import torch

    from peagle.checkpoints.weights import split_weights

    for name, tensor in split_weights(network).items():
        yield name, tensor.to("cpu", dtype)
    if network.config.reduced_vocabulary:
        ids = network.target_ids.cpu()
        yield "d2t", ids - torch.arange(len(ids))


def _target_ids(config: HeadConfig, d2t: Tensor | None, folder: Path) -> Tensor:
    import torch

    identity = torch.arange(config.draft_vocab_size)
    if not config.reduced_vocabulary:
        if d2t is not None and bool(d2t.any()):
            raise HeadError(f"{folder} has d2t although its vocabulary is the target's")
        return identity
    if d2t is None:
        raise HeadError(f"{folder} lacks d2t, which its reduced vocabulary needs")
    if d2t.shape != identity.shape:
        raise HeadError(
            f"{folder}: d2t has shape {list(d2t.shape)}, expected {list(identity.shape)}"
        )
    if d2t.is_floating_point():
        raise HeadError(f"{folder}: d2t is {d2t.dtype}, expected integers")
    ids = identity + d2t
    in_range = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not in_range or len(set(ids.tolist())) < len(ids):
        raise HeadError(f"{folder}: d2t does not map to distinct ids below {config.vocab_size}")
    return ids


@contextlib.contextmanager
def _as_head_errors() -> Iterator[None]:
    """What reads files speaks of models; in a head's folder the same fault is the head's."""
    try:
        yield
    except ModelError as error:
        raise HeadError(error.message, hint=error.hint) from error


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has a field's type: arithmetic on a wrong one fails far from here."""
    if kind is float:
        return type(value) in (int, float)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(type(item) is int for item in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict)
    if get_origin(kind) is UnionType:
        return any(_fits(value, one) for one in get_args(kind))
    return get_origin(kind) is Literal or type(value) is kind


def _info(folder: Path) -> HeadInfo:
    options = read_json(folder / CONFIG)
    return HeadInfo(
        folder.name,
        folder,
        options["method"],
        options["target_model"],
        options["num_speculative_tokens"],
    )

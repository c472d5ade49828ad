"""JSON and weights of model folders, read without surprises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import ModelError
from peagle.files import check_readable, refusal

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except ValueError as error:
        raise ModelError(
            f"{path} is broken: {error}", hint="copy or download the folder again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files of a model folder, each with the tensors it must hold (None: no index)."""
    if (folder / WEIGHTS_INDEX).is_file():
        return _shards(folder)
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    pickled = sorted(f.name for ending in ("*.bin", "*.pt", "*.pth") for f in folder.glob(ending))
    if pickled:
        raise ModelError(
            f"{folder} has weights only as pickle files ({pickled[0]}), which can run code",
            hint="convert it to safetensors: transformers loads it and save_pretrained writes it",
        )
    raise ModelError(
        f"{folder} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}",
        hint="copy or download the folder again",
    )


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors of a model folder; reads headers only."""
    return [name for path, listed in weight_files(folder).items() for name in _names(path, listed)]


def iter_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor once, shard by shard, on the CPU and in its stored dtype.

    Tensors view the mapped file: keep those you need, copy before writing into one.
    """
    for path, listed in weight_files(folder).items():
        names = _names(path, listed)
        with _open_weights(path) as weights:
            for name in names:
                yield name, weights.get_tensor(name)


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and all tensors of one safetensors file."""
    with _open_weights(path) as weights:
        names = list(weights.keys())
        return weights.metadata() or {}, {name: weights.get_tensor(name) for name in names}


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / WEIGHTS_INDEX} has no weight_map")
    shards: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{folder / WEIGHTS_INDEX} names a shard outside its folder: {shard}")
        shards.setdefault(folder / shard, []).append(name)
    for path in shards:
        if not path.is_file():
            raise ModelError(
                f"{folder} lacks the shard {path.name}", hint="download or copy the folder again"
            )
    return dict(shards)


def _names(path: Path, listed: list[str] | None) -> list[str]:
    with _open_weights(path) as weights:
        held = list(weights.keys())
    missing = sorted(set(listed or ()) - set(held))
    if missing:
        raise ModelError(f"{path} lacks {missing[0]}, which {WEIGHTS_INDEX} says it holds")
    return held if listed is None else listed


def _open_weights(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        check_readable(path)
        return safe_open(path, framework="pt")
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, ValueError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file: {error}",
            hint="download or copy it again",
        ) from error


def _unreadable(path: Path, error: OSError) -> ModelError:
    reason, remedy = refusal(error)
    return ModelError(f"{path} cannot be read: {reason}", hint=remedy)

"""The target's hidden states on disk: written once by `peagle capture`, read by training.

    features.json              target, layers and dtype, and the list of shards
    features-00000.safetensors token_ids int32 [T], states bf16 [T, H],
                               aux_hidden_states bf16 [T, 3H]

The token ids lie beside the states and are compared when a row is read: states of other tokens
would train without an error and draft nonsense.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from peagle.checkpoints.references import load_config, resolve_model
from peagle.checkpoints.targets import load_layerless
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.data.packing import PackedRow, assign, pack
from peagle.engine.loading import choose_device, choose_dtype, load_engine_target
from peagle.errors import DataError
from peagle.files import check_readable, write_atomic, write_json, writing
from peagle.models.config import DecoderConfig
from peagle.models.target import default_aux_hidden_state_layers
from peagle.processes import uninterrupted
from peagle.teacher_forcing.features import (
    Features,
    FeatureSource,
    Fetched,
    OnlineFeatures,
    StoredStates,
)
from peagle.train.features.vllm_features import VllmFeatures
from peagle.train.features.vllm_server import RequiredStates, open_features
from peagle.train.recipe import VllmSection

FORMAT = "peagle-features-2"
INDEX = "features.json"
PASSES_AHEAD = 2


@dataclass(frozen=True)
class CapturePlan:
    model: str
    folder: Path
    config: EngineConfig
    aux_hidden_state_layers: tuple[int, ...]
    num_rows: int
    num_tokens: int
    num_bytes: int
    vllm: VllmSection | None  # None: the target runs in this process


def plan_capture(
    dataset: Dataset,
    model: str,
    config: EngineConfig,
    aux_hidden_state_layers: tuple[int, ...] | None,
    vllm: VllmSection | None = None,
) -> CapturePlan:
    """Reads sizes alone: nothing is loaded and nothing written."""
    choose_device(config)  # a device that is not there is said before a model is fetched
    folder = resolve_model(model)
    sizes = DecoderConfig.from_transformers(load_config(folder))
    layers = aux_hidden_state_layers or default_aux_hidden_state_layers(sizes.num_hidden_layers)
    if not all(0 <= layer <= sizes.num_hidden_layers for layer in layers):
        raise DataError(
            f"layers {list(layers)} are not all the target's",
            hint=f"use layer ids from 0 to {sizes.num_hidden_layers}",
        )
    num_tokens = int(dataset.lengths.sum())
    num_bytes = states_bytes(num_tokens, sizes.hidden_size, len(layers))
    return CapturePlan(model, folder, config, layers, len(dataset), num_tokens, num_bytes, vllm)


def run_capture(
    dataset: Dataset, plan: CapturePlan, folder: Path, *, tokens_per_pass: int, max_disk: int | None
) -> Iterator[int]:
    """Yields the rows done so far, after each shard."""
    source = _source(plan, dataset, folder)
    longest = max(tokens_per_pass, int(dataset.lengths.max()))
    with writing(folder, then="give the same command again: states written before are safe"):
        yield from capture(
            dataset, source, folder, plan.model, tokens_per_pass=longest, max_disk=max_disk
        )


def _source(plan: CapturePlan, dataset: Dataset, folder: Path) -> OnlineFeatures | VllmFeatures:
    if plan.vllm is None:
        target = load_engine_target(plan.folder, plan.config).requires_grad_(False)
        return OnlineFeatures(target, plan.aux_hidden_state_layers)
    device = choose_device(plan.config)
    dtype = choose_dtype(plan.config, device)
    target = load_layerless(plan.folder, dtype=dtype, device=device).requires_grad_(False)
    longest = int(dataset.lengths.max())
    need = RequiredStates(plan.model, target.config, plan.aux_hidden_state_layers, longest, dtype)
    return open_features(plan.vllm, need, target, folder / "vllm.log")


def states_bytes(num_tokens: int, hidden_size: int, num_aux_hidden_states: int) -> int:
    """Disk use of a capture: aux_hidden_states and states in bf16, and the token ids."""
    return num_tokens * (2 * hidden_size * (num_aux_hidden_states + 1) + 4)


def check_disk(needed: int, folder: Path, max_disk: int | None) -> None:
    if max_disk is not None and needed > max_disk:
        raise DataError(
            f"the states need {size_in_words(needed)}, "
            f"more than the {size_in_words(max_disk)} allowed",
            hint="raise --max-disk, capture fewer rows, or train with the target in process",
        )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"the states need {size_in_words(needed)}, {size_in_words(free)} are free in {folder}",
            hint="make room, or train with the target in process",
        )


def size_in_words(size: float) -> str:
    """`512 B`, `3.4 MiB`, `120.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def capture(
    dataset: Dataset,
    source: OnlineFeatures | VllmFeatures,
    folder: Path,
    target_model: str,
    *,
    tokens_per_pass: int,
    max_disk: int | None = None,
) -> Iterator[int]:
    """Writes one shard per pass of the target; yields the rows done so far. Resumable."""
    folder.mkdir(parents=True, exist_ok=True)
    index = _open_index(folder, target_model, source.aux_hidden_state_layers)
    done = {row_id for shard in index["shards"] for row_id in shard["rows"]}
    left = [i for i, info in enumerate(dataset.info) if info["id"] not in done]
    tokens = int(dataset.lengths[left].sum())
    size = source.target.config.hidden_size
    check_disk(states_bytes(tokens, size, len(source.aux_hidden_state_layers)), folder, max_disk)
    for row, features in _passes(dataset, left, source, tokens_per_pass):
        name = f"features-{len(index['shards']):05d}.safetensors"
        with uninterrupted():
            index["shards"].append(_write_shard(dataset, row, features, folder / name))
            write_json(folder / INDEX, index)
        yield sum(len(shard["rows"]) for shard in index["shards"])


def _passes(
    dataset: Dataset, rows: list[int], source: FeatureSource, tokens_per_pass: int
) -> Iterator[tuple[PackedRow, Features]]:
    """The next passes are asked for before one is computed: a server is never left idle."""
    waiting: deque[tuple[PackedRow, Fetched]] = deque()
    for items in assign(dataset.lengths[rows].tolist(), tokens_per_pass):
        indices = [rows[i] for i in items]
        row = pack(dataset, indices, int(dataset.lengths[indices].sum()))
        waiting.append((row, source.fetch(row)))
        if len(waiting) > PASSES_AHEAD:
            row, fetched = waiting.popleft()
            yield row, source(row, fetched)
    for row, fetched in waiting:
        yield row, source(row, fetched)


def _write_shard(
    dataset: Dataset, row: PackedRow, features: Features, path: Path
) -> dict[str, Any]:
    tensors = {
        "token_ids": row.token_ids.int(),
        "aux_hidden_states": features.aux_hidden_states.to("cpu", torch.bfloat16),
        "states": features.states.to("cpu", torch.bfloat16),
    }
    write_atomic(path, save(tensors))
    ids = [dataset.info[i]["id"] for i in row.indices]
    return {"name": path.name, "rows": ids, "lengths": dataset.lengths[row.indices].tolist()}


def _open_index(
    folder: Path, target_model: str, aux_hidden_state_layers: tuple[int, ...]
) -> dict[str, Any]:
    made = {
        "format": FORMAT,
        "target": target_model,
        "aux_hidden_state_layers": list(aux_hidden_state_layers),
    }
    if not (folder / INDEX).exists():
        return {**made, "shards": []}
    index = read_index(folder)
    if any(index[key] != value for key, value in made.items()):
        raise DataError(
            f"{folder} holds states of {index['target']}, "
            f"layers {index['aux_hidden_state_layers']}",
            hint="capture into a new folder",
        )
    return index


def read_index(folder: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no captured states: {error}", hint="run `peagle capture` first"
        ) from None
    if index.get("format") != FORMAT:
        raise DataError(f"{folder / INDEX} has format {index.get('format')!r}, not {FORMAT!r}")
    return index


class StoredFeatures:
    """Reads what `capture` wrote, row by row, memory-mapped."""

    def __init__(
        self,
        folder: Path,
        target_model: str,
        aux_hidden_state_layers: tuple[int, ...],
        dataset: Dataset,
        like: Tensor,  # a weight of the target: features get its device and dtype
    ) -> None:
        index = read_index(folder)
        if (
            tuple(index["aux_hidden_state_layers"]) != aux_hidden_state_layers
            or index["target"] != target_model
        ):
            raise DataError(
                f"{folder} holds layers {index['aux_hidden_state_layers']} of {index['target']}, "
                f"but the head reads {list(aux_hidden_state_layers)} of {target_model}",
                hint="capture again, or set head.aux_hidden_state_layer_ids",
            )
        self.dataset, self.device, self.dtype = dataset, like.device, like.dtype
        self._shards = [_open_shard(folder / shard["name"]) for shard in index["shards"]]
        self._places: dict[str, tuple[int, int]] = {}  # row id -> shard, first token
        for number, shard in enumerate(index["shards"]):
            start = 0
            for row_id, length in zip(shard["rows"], shard["lengths"], strict=True):
                self._places[row_id] = number, start
                start += length

    def fetch(self, row: PackedRow) -> StoredStates:
        parts = [self._read(index) for index in row.indices]
        padding = len(row.token_ids) - sum(len(aux_hidden_states) for aux_hidden_states, _ in parts)
        aux_hidden_states = torch.cat([aux_hidden_states for aux_hidden_states, _ in parts])
        states = torch.cat([states for _, states in parts])
        pad = torch.nn.functional.pad
        return StoredStates(
            pad(aux_hidden_states, (0, 0, 0, padding)), pad(states, (0, 0, 0, padding))
        )

    def __call__(self, row: PackedRow, fetched: Fetched) -> Features:
        assert isinstance(fetched, StoredStates)
        tokens = row.token_ids.to(self.device, non_blocking=True)
        aux_hidden_states = fetched.aux_hidden_states.to(self.device, self.dtype, non_blocking=True)
        states = fetched.states.to(self.device, self.dtype, non_blocking=True)
        return Features(tokens.roll(-1), aux_hidden_states, states)

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        row_id, length = self.dataset.info[index]["id"], int(self.dataset.lengths[index])
        if row_id not in self._places:
            raise DataError(
                f"row {row_id!r} was not captured", hint="run `peagle capture` again to add it"
            )
        shard, start = self._places[row_id]
        tensors = self._shards[shard]
        here = slice(start, start + length)
        expected = torch.as_tensor(self.dataset[index].token_ids)
        if not torch.equal(tensors["token_ids"][here], expected):
            raise DataError(
                f"the captured states of row {row_id!r} belong to other tokens",
                hint="the dataset changed after the capture: capture again",
            )
        return tensors["aux_hidden_states"][here], tensors["states"][here]


def _open_shard(path: Path) -> dict[str, Tensor]:
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            return {
                name: file.get_tensor(name) for name in ("token_ids", "aux_hidden_states", "states")
            }
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="capture again") from None

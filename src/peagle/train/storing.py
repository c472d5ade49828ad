"""A capture from references: what it will take, and the capture itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from peagle.checkpoints.references import load_config, resolve_model
from peagle.checkpoints.targets import decoder_sizes, load_layerless
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.engine.loading import choose_device, choose_dtype, load_engine_target
from peagle.errors import DataError
from peagle.models.config import DecoderConfig
from peagle.models.target import default_aux_hidden_state_layers
from peagle.train.capture import capture, forecast_bytes
from peagle.train.features import OnlineFeatures
from peagle.train.recipe import VllmSection
from peagle.train.vllm_features import VllmFeatures
from peagle.train.vllm_source import Need, open_features


@dataclass(frozen=True)
class Plan:
    model: str
    folder: Path
    config: EngineConfig
    aux_hidden_state_layers: tuple[int, ...]
    num_rows: int
    num_tokens: int
    num_bytes: int
    vllm: VllmSection | None  # None: the target runs in this process


def forecast(
    dataset: Dataset,
    model: str,
    config: EngineConfig,
    aux_hidden_state_layers: tuple[int, ...] | None,
    vllm: VllmSection | None = None,
) -> Plan:
    """Reads sizes alone: nothing is loaded and nothing written."""
    folder = resolve_model(model)
    known = decoder_sizes if vllm else DecoderConfig.from_transformers
    sizes = known(load_config(folder))
    layers = aux_hidden_state_layers or default_aux_hidden_state_layers(sizes.num_hidden_layers)
    if not all(0 <= layer <= sizes.num_hidden_layers for layer in layers):
        raise DataError(f"layers {list(layers)} are not all in 0..{sizes.num_hidden_layers}")
    num_tokens = int(dataset.lengths.sum())
    num_bytes = forecast_bytes(num_tokens, sizes.hidden_size, len(layers))
    return Plan(model, folder, config, layers, len(dataset), num_tokens, num_bytes, vllm)


def store(
    dataset: Dataset, plan: Plan, folder: Path, *, tokens_per_pass: int, max_disk: int | None
) -> Iterator[int]:
    """Yields the rows done so far, after each shard."""
    source = _source(plan, dataset, folder)
    longest = max(tokens_per_pass, int(dataset.lengths.max()))
    try:
        yield from capture(
            dataset, source, folder, plan.model, tokens_per_pass=longest, max_disk=max_disk
        )
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write to {folder}: {error}",
            hint="states written before are safe: make room and give the same command again",
        ) from error


def _source(plan: Plan, dataset: Dataset, folder: Path) -> OnlineFeatures | VllmFeatures:
    if plan.vllm is None:
        target = load_engine_target(plan.folder, plan.config).requires_grad_(False)
        return OnlineFeatures(target, plan.aux_hidden_state_layers)
    device = choose_device(plan.config)
    dtype = choose_dtype(plan.config, device)
    target = load_layerless(plan.folder, dtype=dtype, device=device).requires_grad_(False)
    longest = int(dataset.lengths.max())
    need = Need(plan.model, target.config, plan.aux_hidden_state_layers, longest, dtype)
    return open_features(plan.vllm, need, target, folder / "vllm.log")

"""Instance types, and whether a model and its head fit one.

What is counted: weights as they are stored, one request of the longest length in the cache, and a
reserve on each GPU for activations and CUDA graphs. More cache means more requests at once.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peagle.backends.vllm.arguments import VllmServer
from peagle.backends.vllm.drafting import VllmDrafter
from peagle.backends.vllm.released import ReleasedModel, nearest_name
from peagle.checkpoints.files import weight_files
from peagle.checkpoints.references import is_hub_id
from peagle.errors import ConfigError

TABLE = "instances.toml"
RESERVE_GB = 4.0  # on each GPU
UTILIZATION = 0.9  # vLLM's share of a GPU where nobody says
GB = 1e9
SKIP = "--skip-memory-check takes it as it is"


@dataclass(frozen=True)
class Instance:
    name: str
    gpu: str
    num_gpus: int
    gb: float  # of each GPU

    def room_gb(self, gpus: int, utilization: float) -> float:
        return (self.gb * utilization - RESERVE_GB) * gpus

    def __str__(self) -> str:
        return f"{self.name} ({self.num_gpus} x {self.gpu}, {self.gb:g} GB each)"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """GB that a deployment needs; None: not known here."""

    target_gb: float | None
    head_gb: float | None = 0.0
    cache_gb: float | None = None  # one request of the longest length

    @property
    def known_gb(self) -> float:
        return sum(part or 0.0 for part in (self.target_gb, self.head_gb, self.cache_gb))

    def fits(self, instance: Instance, gpus: int, utilization: float) -> bool:
        """Whether one copy of the model fits `gpus` GPUs."""
        return self.known_gb <= instance.room_gb(gpus, utilization)


@functools.cache
def instances() -> Mapping[str, Instance]:
    table = tomllib.loads((resources.files("peagle.deploy") / TABLE).read_text("utf-8"))
    return MappingProxyType({name: Instance(name, *row) for name, row in table.items()})


def choose_instance(
    asked: str | None, server: VllmServer, memory: Memory, *, skip_check: bool
) -> tuple[str, int]:
    """The instance type, asked for or the first that fits, and vLLM's tensor_parallel_size."""
    if asked is None:
        return _first_fitting(server, memory)
    if skip_check:
        known = instances().get(asked, Instance(asked, "GPU", 1, 0.0))
        return asked, _tensor_parallel_size(server, known)
    instance = find_instance(asked)
    if not _fits(instance, server, memory):
        raise _too_small(instance, server, memory)
    return asked, _tensor_parallel_size(server, instance)


def find_instance(name: str) -> Instance:
    found = instances().get(name)
    if found is None:
        nearest = nearest_name(name, instances())
        meant = f"did you mean {nearest}? " if nearest else ""
        raise ConfigError(
            f"instance type {name!r} is not a GPU instance type that is known here",
            hint=f"{meant}{SKIP}",
        )
    return found


def _first_fitting(server: VllmServer, memory: Memory) -> tuple[str, int]:
    if memory.target_gb is None:
        raise ConfigError(
            "how much memory the model needs is not known here, so no instance type is chosen",
            hint="give --instance-type, and --weights-gb to have it checked",
        )
    for instance in instances().values():
        if _fits(instance, server, memory):
            return instance.name, _tensor_parallel_size(server, instance)
    raise ConfigError(
        f"no known instance type has room for {memory.known_gb:.0f} GB",
        hint="raise --tensor-parallel-size, lower --max-model-len, or give --instance-type "
        "with --skip-memory-check",
    )


def _fits(instance: Instance, server: VllmServer, memory: Memory) -> bool:
    options = server.options
    per_copy = _tensor_parallel_size(server, instance) * (options.pipeline_parallel_size or 1)
    enough = per_copy * (options.data_parallel_size or 1) <= instance.num_gpus
    utilization = options.gpu_memory_utilization or UTILIZATION
    return enough and memory.fits(instance, per_copy, utilization)


def _tensor_parallel_size(server: VllmServer, instance: Instance) -> int:
    """What was asked for, or as many GPUs as the target's attention heads can be shared by."""
    options = server.options
    if options.tensor_parallel_size:
        return options.tensor_parallel_size
    copies = (options.pipeline_parallel_size or 1) * (options.data_parallel_size or 1)
    most = max(instance.num_gpus // copies, 1)
    heads = text_config(server).get("num_attention_heads", most)
    return max(n for n in range(1, most + 1) if heads % n == 0)


def _too_small(instance: Instance, server: VllmServer, memory: Memory) -> ConfigError:
    options = server.options
    per_copy = _tensor_parallel_size(server, instance) * (options.pipeline_parallel_size or 1)
    gpus = per_copy * (options.data_parallel_size or 1)
    if gpus > instance.num_gpus:
        return ConfigError(
            f"{gpus} GPUs are asked for, and {instance} has fewer",
            hint="lower --tensor-parallel-size, or take a larger --instance-type",
        )
    room = instance.room_gb(per_copy, options.gpu_memory_utilization or UTILIZATION)
    fitting = next((i for i in instances().values() if _fits(i, server, memory)), None)
    larger = f"use {fitting.name} or larger, or " if fitting else ""
    return ConfigError(
        f"model, head and one request need {memory.known_gb:.1f} GB; {instance} has "
        f"{room:.1f} GB for them on {per_copy} of its GPUs",
        hint=f"{larger}lower --max-model-len; {SKIP}",
    )


def memory_of(
    server: VllmServer, released: ReleasedModel | None, weights_gb: float | None
) -> Memory:
    """`weights_gb`, what the user says of the target, wins."""
    target_gb = weights_gb
    if target_gb is None:
        target_gb = released.target_gb if released else stored_gb(server.target.reference)
    return Memory(
        target_gb=target_gb,
        head_gb=_head_gb(server.drafting, released),
        cache_gb=_cache_gb(server, released),
    )


def _head_gb(drafting: VllmDrafter | None, released: ReleasedModel | None) -> float | None:
    head = drafting.config.get("model") if drafting else None
    if drafting is None or head is None:
        return 0.0
    if released is not None and released.has_head(head):
        return released.head_gb
    return stored_gb(drafting.export.head if drafting.export else head)


def stored_gb(reference: str) -> float | None:
    """Of a folder on this machine, or by the listing of the hub where that can be reached."""
    folder = Path(reference)
    if folder.is_dir():
        return sum(file.stat().st_size for file in weight_files(folder)) / GB
    return _hub_gb(reference) if is_hub_id(reference) else None


def _hub_gb(repository: str) -> float | None:
    from huggingface_hub import HfApi

    try:
        listed = HfApi().model_info(repository, files_metadata=True, timeout=5).siblings or []
    except Exception:  # the hub's own errors, the HTTP library's, the system's: it is not known
        return None
    sizes = [f.size or 0 for f in listed if f.rfilename.endswith(".safetensors")]
    return sum(sizes) / GB if any(sizes) else None


def _cache_gb(server: VllmServer, released: ReleasedModel | None) -> float | None:
    config = text_config(server)
    values = released.kv_values_per_token if released else _kv_values(config)
    length = server.options.max_model_len or config.get("max_position_embeddings")
    if values is None or length is None:
        return None
    size = 1 if (server.options.kv_cache_dtype or "").startswith("fp8") else 2
    return float(values * length * size / GB)


def text_config(server: VllmServer) -> Mapping[str, Any]:
    """The target's config.json; empty where it does not lie on this machine."""
    config = server.target.config or {}
    nested: Mapping[str, Any] = config.get("text_config", config)
    return nested


def _kv_values(config: Mapping[str, Any]) -> int | None:
    """Keys and values of one token in all layers; None where config.json does not say."""
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * kv_heads * head_dim * config["num_hidden_layers"])
    except (KeyError, TypeError):
        return None

"""Engines by what they draft with, built when first needed; the one unused longest goes first."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from peagle.backends.contract import Backend
from peagle.backends.vllm.options import VllmOptions
from peagle.bench.grid import Drafting, HeadLimits
from peagle.bench.plan import ENGINE_KEYS, OUR_KEYS, VLLM, VLLM_KEYS, BenchPlan
from peagle.bench.results import HeadInfo
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.layouts import CONFIG
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import load_config, resolve_model
from peagle.config import MAX_SPECULATIVE_TOKENS, EngineConfig, SpeculativeConfig

# model, sizes, drafter, and vLLM's own options where the backend is vLLM
Build = Callable[[str, EngineConfig, SpeculativeConfig | None, VllmOptions | None], Backend]


class Engines:
    """One per head, which serves every K (vLLM: one per head and K, since its K is fixed)."""

    def __init__(self, plan: BenchPlan, methods: Sequence[Drafting], build: Build) -> None:
        self.plan, self.build = plan, build
        self.deepest: dict[str | None, int] = {}
        for drafting in methods:
            key = drafting.head or drafting.method
            depth = drafting.num_speculative_tokens
            self.deepest[key] = max(depth, self.deepest.get(key, 0))
        every = 1 if plan.backend == VLLM else len(self.deepest)
        self.most = min(plan.max_engines or every, len(methods))
        self._alive: dict[Drafting, Backend] = {}  # the one used longest ago first
        self._numbers: dict[Drafting, int] = {}  # of those alive, in the order they were built
        self._num_built = 0

    def get(self, drafting: Drafting) -> Backend:
        key = self._key(drafting)
        if key in self._alive:
            self._alive[key] = self._alive.pop(key)
            return self._alive[key]
        while len(self._alive) >= self.most:
            self._end(next(iter(self._alive)))
        config = self._share(engine_config(self.plan))
        backend = self.build(self.plan.model, config, _drafter(key), vllm_options(self.plan))
        self._alive[key] = backend
        self._num_built += 1
        self._numbers[key] = self._num_built
        return backend

    def number(self, drafting: Drafting) -> int:
        """Another one after the engine was closed and built again."""
        self.get(drafting)
        return self._numbers[self._key(drafting)]

    def _share(self, config: EngineConfig) -> EngineConfig:
        """The limit counts what is in use already, so engine n of m may fill n/m of it: without
        that the first one's cache would leave nothing to the others of this GPU."""
        whole = config.gpu_memory_utilization
        part = (len(self._alive) + 1) / self.most
        return replace(config, gpu_memory_utilization=whole * part)

    def close(self) -> None:
        for key in list(self._alive):
            self._end(key)

    def _key(self, drafting: Drafting) -> Drafting:
        if self.plan.backend == VLLM:
            return drafting
        deepest = self.deepest[drafting.head or drafting.method]
        return drafting._replace(num_speculative_tokens=deepest)

    def _end(self, key: Drafting) -> None:
        self._alive.pop(key).close()
        gc.collect()
        with suppress(ImportError):
            import torch

            torch.cuda.empty_cache()  # nothing to do without CUDA


def engine_config(plan: BenchPlan) -> EngineConfig:
    """Room for every stream at once: a request that waits for a place measures the setting."""
    given = {name: getattr(plan, name) for name in ENGINE_KEYS}
    if plan.backend == VLLM:
        del given["quantization"]  # its options carry it: it knows more kinds than we do
    sizes = {name: value for name, value in given.items() if value is not None}
    streams = max([*plan.concurrencies, EngineConfig.max_num_seqs])
    return EngineConfig(**{"max_num_seqs": streams, "seed": plan.seed, **sizes})


def vllm_options(plan: BenchPlan) -> VllmOptions | None:
    """None for the embedded engine."""
    if plan.backend != VLLM:
        return None
    names = [name for name in (*ENGINE_KEYS, *VLLM_KEYS) if name not in OUR_KEYS]
    return VllmOptions(**{name: getattr(plan, name) for name in names})


def head_limits(references: Sequence[str], model: str) -> list[HeadLimits]:
    """Reads each head's config, and refuses one for another model before anything is loaded."""
    if not references:
        return []
    target = load_config(resolve_model(model)).get_text_config()
    found = []
    for reference in references:
        config = read_head_config(resolve_head(reference))
        config.check_fits(target)
        deepest = config.max_speculative_tokens
        if config.method == "eagle3":
            deepest = MAX_SPECULATIVE_TOKENS  # it drafts one by one, as far as one likes
        found.append(HeadLimits(reference, config.method, config.num_speculative_tokens, deepest))
    return found


def head_info(limits: HeadLimits) -> HeadInfo:
    """With a digest of its files, so that a head trained on is another head."""
    folder, digest = resolve_head(limits.reference), hashlib.sha256()
    for path in (folder / CONFIG, *sorted(folder.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return HeadInfo(limits.reference, limits.method, digest.hexdigest())


def _drafter(key: Drafting) -> SpeculativeConfig | None:
    if not key.num_speculative_tokens:
        return None
    return SpeculativeConfig.from_mapping(
        {
            "method": None if key.head else key.method,
            "model": key.head,
            "num_speculative_tokens": key.num_speculative_tokens,
        }
    )

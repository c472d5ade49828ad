"""What a grid measures: the keys of `peagle bench`, on the command line or in a YAML file.

Each default stands here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from peagle.bench.results.settings import NONE
from peagle.bench.workloads.sources import OFFLINE, split_references
from peagle.config import EngineConfig, Method, SpeculationMode, from_mapping
from peagle.errors import ConfigError

EMBEDDED, VLLM = "embedded", "vllm"
SAGEMAKER = "sagemaker:"  # before an endpoint's name
NGRAM, P_EAGLE = "ngram", "p-eagle"
AUTO, FIXED = get_args(SpeculationMode)
NEEDED = {"model": "MODEL", "out": "--out DIR"}  # key -> how to give it
MOST_REPEATS = 1000
# Keys that go to the engine under the same names, and those that vLLM alone knows.
ENGINE_KEYS = (
    *("dtype", "device", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "kv_cache_memory_bytes", "quantization", "gpu_memory_utilization"),
    *("batch_invariant", "enable_prefix_caching"),
)
OUR_KEYS = ("device", "dtype", "batch_invariant")  # those that no option of vLLM's carries
VLLM_KEYS = ("tensor_parallel_size", "kv_cache_dtype", "enforce_eager")


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Lists may be written as one text with commas."""

    model: str
    out: str
    spec_model: list[str] = field(default_factory=list)
    spec_method: list[str] = field(default_factory=list)
    spec_tokens: list[int] = field(default_factory=list)  # empty: what each head advises
    spec_nodes: list[int] = field(default_factory=list)  # trees of so many nodes, beside chains
    speculation: list[str] = field(default_factory=list)  # auto, fixed (at each K and N) or both
    concurrency: list[int] = field(default_factory=list)  # empty: 1, unless there are rates
    request_rate: list[float] = field(default_factory=list)  # requests per second
    workload: list[str] = field(default_factory=lambda: [OFFLINE])
    num_prompts: int | None = None  # of each workload; None: all (synthetic: 32)
    # A closed loop asks for at least so many answers per stream: with fewer its end, in which
    # streams stand idle, weighs much. And for at least `min_answers` in all; None: the workload's.
    answers_per_stream: int = 3
    min_answers: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    raw: bool = False
    repeats: int = 3
    warmup: int | None = None  # requests before a cell's first run; None: as many as its streams
    interleave: bool = True
    max_engines: int | None = None  # alive at once; None: all embedded ones, one of vLLM's
    seed: int = 0
    backend: str = EMBEDDED
    overwrite: bool = False
    dtype: str = EngineConfig.dtype
    device: str = EngineConfig.device
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    batch_invariant: bool | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None  # None: off, for every repeat has the same prompts
    enforce_eager: bool | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "request_rate", "spec_tokens", "spec_nodes"):
            for value in getattr(self, name):
                _require(0 < value < math.inf, name, value, "more than 0")
        counts = ("repeats", "max_tokens", "answers_per_stream", "min_answers", "max_engines")
        for name in (*counts, "num_prompts"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "1 or more")
        _require(self.repeats <= MOST_REPEATS, "repeats", self.repeats, f"1 to {MOST_REPEATS}")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        _require(self.warmup is None or self.warmup >= 0, "warmup", self.warmup, "0 or more")
        for method in self.spec_method:
            if not self.is_endpoint and method not in get_args(Method):
                known = ", ".join(get_args(Method))
                raise ConfigError(f"--spec-method {method} is unknown", hint=f"use one of: {known}")
        if self.spec_tokens and not (self.spec_model or set(self.spec_method) - {NONE}):
            raise ConfigError(
                "--spec-tokens was given, but no drafter",
                hint="add --spec-model HEAD or --spec-method ngram",
            )
        for mode in self.speculation:
            if mode not in (AUTO, FIXED):
                raise ConfigError(
                    f"--speculation {mode} is unknown", hint=f"use {AUTO}, {FIXED} or both"
                )
        if AUTO in self.speculation and self.backend != EMBEDDED:
            raise ConfigError(
                "--speculation auto: only the embedded engine chooses", hint="drop it"
            )
        if AUTO in self.speculation and not self.spec_model and NGRAM not in self.spec_method:
            raise ConfigError(
                "--speculation auto was given, but no drafter",
                hint="add --spec-model HEAD or --spec-method ngram",
            )
        if self.spec_nodes and self.backend != EMBEDDED:
            raise ConfigError("--spec-nodes: only the embedded engine drafts trees", hint="drop it")
        self._refuse_unused()

    @property
    def is_endpoint(self) -> bool:
        return self.backend not in (EMBEDDED, VLLM)

    @property
    def concurrencies(self) -> list[int]:
        return self.concurrency or ([] if self.request_rate else [1])

    @property
    def path(self) -> Path:
        return Path(self.out).expanduser()

    def _refuse_unused(self) -> None:
        used: tuple[str, ...] = {EMBEDDED: ENGINE_KEYS, VLLM: (*ENGINE_KEYS, *VLLM_KEYS)}.get(
            self.backend, ()
        )
        for name in (*ENGINE_KEYS, *VLLM_KEYS):
            if name not in used and getattr(self, name) not in (None, "auto"):
                raise ConfigError(f"{name} has no effect on backend {self.backend}", hint="drop it")
        if self.is_endpoint and not self.backend.startswith(("http://", "https://", SAGEMAKER)):
            raise ConfigError(
                f"backend {self.backend!r} is unknown",
                hint="use embedded, vllm, http://HOST:PORT or sagemaker:ENDPOINT",
            )
        several = len(self.spec_method) > 1 or len(self.spec_tokens) > 1
        if self.is_endpoint and (self.spec_model or several):
            raise ConfigError(
                "an endpoint runs the one drafter that its server was started with",
                hint="name it by --spec-method and --spec-tokens, one each, for the tables",
            )


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value} is out of range", hint=f"use {allowed}")


def make_plan(given: Mapping[str, Any], where: str) -> BenchPlan:
    """Takes the keys of a file or of flags; an unknown key is an error that names the nearest."""
    options = {key: value for key, value in given.items() if value is not None}
    for key, how in NEEDED.items():
        if key not in options:
            raise ConfigError(f"{where} does not set {key}", hint=f"give {how}")
    kinds = get_type_hints(BenchPlan)
    lists = {key: _listed(value, kinds.get(key)) for key, value in options.items()}
    return from_mapping(BenchPlan, lists, where)


def _listed(value: Any, kind: Any) -> Any:
    """Where a list is wanted, `3,5` and 3 are lists, too."""
    if get_origin(kind) is not list or isinstance(value, list):
        return value
    if isinstance(value, str):
        return split_references(value) if kind == list[str] else value.split(",")
    return [value]

"""GPUs by their peaks as commonly stated (gpus.json), and how much of a peak we count on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from peagle.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}


@dataclass(frozen=True)
class Gpu:
    name: str
    bandwidth: float  # bytes per second
    flops: float  # matrix products per second, of the dtype that was asked for
    memory_bytes: float


@dataclass(frozen=True)
class Assumptions:
    """What peak figures do not say. Chosen so that the 63 steps of an 8B-class target on one H200
    come out best (benchmarks/results/step_costs_8b_h200.json): give your own where you know
    better, above all for other GPUs and engines."""

    bandwidth_share: float = 0.73  # of the peak, when a product reads its weights
    cache_share: float = 0.63  # the same of attention: keys and values lie in scattered blocks
    flops_share: float = 0.73  # of the peak, in a product of many rows
    kernel_overhead: float = 2.3e-6  # seconds to start and end any kernel, in a CUDA graph
    # Seconds in which the device waits for the host: 8 to 180 us up to 32 requests in
    # benchmarks/results/engine_h200.json, 170 to 490 with 128.
    step_overhead: float = 3e-5

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "cache_share", "flops_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is no share", hint="use 0 to 1")
        for name in ("kernel_overhead", "step_overhead"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative", hint="use >= 0")


@cache
def gpu_table() -> dict[str, dict[str, Any]]:
    text = resources.files("peagle.bench").joinpath("gpus.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)["gpus"]
    return table


def find_gpu(name: str, dtype: str) -> Gpu:
    """A preset by its short name."""
    table = gpu_table()
    row = table.get(name.lower())
    if row is None:
        raise ConfigError(f"no preset for GPU {name!r}", hint=f"known: {', '.join(table)}")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"no peak for dtype {dtype!r}", hint=f"known: {', '.join(DTYPE_BYTES)}")
    tflops = row["tflops"][dtype]
    if tflops is None:
        raise ConfigError(f"{row['name']} has no {dtype} products", hint="use --dtype bfloat16")
    return Gpu(
        name=row["name"],
        bandwidth=row["bandwidth_gb_s"] * 1e9,
        flops=tflops * 1e12,
        memory_bytes=row["memory_gb"] * 1e9,
    )

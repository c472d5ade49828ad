"""Seconds of a step, computed from the sizes of a dense decoder and the peaks of a GPU.

A pass is a list of kernels; each takes the longer of reading its bytes and multiplying, and the
time that it takes to start and end. Sizes are read from config.json alone: the weights may be
anywhere, or not there yet. Peaks are as commonly stated (gpus.json), and `Assumptions` say how much
of a peak is counted on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from peagle.errors import ConfigError, ModelError

# transformers' names of the number of experts; a mixture reads only some of its weights a step.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
P_EAGLE_LAYERS, EAGLE3_LAYERS = 4, 1  # of the released heads
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
SMALL_KERNELS = 4  # in a layer: two norms, rotation with the cache's write, activation


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_parameters(self) -> int:
        """Those of matrix products; the input embedding is looked up, not multiplied."""
        return self.num_layers * sum(self.layer_products()) + self.hidden_size * self.vocab_size

    def layer_products(self) -> tuple[int, int, int, int]:
        """Weights of q/k/v, output, gate/up and down."""
        h, i = self.hidden_size, self.intermediate_size
        attention = self.num_heads * self.head_dim
        return h * (attention + self.kv_values_per_token()), attention * h, 2 * h * i, i * h

    def kv_values_per_token(self) -> int:
        """Keys and values in the cache of one layer."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """A head. `parallel`: one pass drafts all tokens (P-EAGLE); else one pass each (EAGLE-3)."""

    method: str
    decoder: DecoderShape
    parallel: bool


def decoder_shape(config: Mapping[str, Any], where: str) -> DecoderShape:
    """Reads a transformers config.json of a text model with dense layers."""
    config = config.get("text_config", config)
    if any((config.get(key) or 0) > 1 for key in EXPERT_KEYS):
        raise ModelError(
            f"{where} is a mixture of experts, whose step costs are not computed",
            hint="measure them: peagle simulate --costs FILE",
        )
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return DecoderShape(
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where} does not give a decoder's sizes: {error!r}") from None


def drafter_shape(
    method: str, target: DecoderShape, *, num_layers: int | None = None, vocab: int | None = None
) -> DrafterShape | None:
    """A head as wide as its target, as the released ones are; None: drafts cost nothing."""
    if method == "ngram":
        return None
    if method not in ("p-eagle", "eagle3"):
        raise ConfigError(
            f"method {method!r} has no known sizes", hint="use p-eagle, eagle3 or ngram"
        )
    parallel = method == "p-eagle"
    layers = num_layers or (P_EAGLE_LAYERS if parallel else EAGLE3_LAYERS)
    decoder = replace(target, num_layers=layers, vocab_size=vocab or target.vocab_size)
    return DrafterShape(method=method, decoder=decoder, parallel=parallel)


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
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range", hint="use a share in (0, 1]"
                )
        for name in ("kernel_overhead", "step_overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range", hint="use >= 0")
        for name in ("kernel_overhead", "step_overhead"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative", hint="use >= 0")


@cache
def gpu_table() -> dict[str, dict[str, Any]]:
    text = (
        resources.files("peagle.bench.simulate").joinpath("gpus.json").read_text(encoding="utf-8")
    )
    table: dict[str, dict[str, Any]] = json.loads(text)["gpus"]
    return table


def find_gpu(name: str, dtype: str) -> Gpu:
    """A preset by its short name."""
    table = gpu_table()
    row = table.get(name.lower())
    if row is None:
        raise ConfigError(f"GPU {name!r} is not known", hint=f"use one of: {', '.join(table)}")
    if dtype not in DTYPE_BYTES:
        names = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"dtype {dtype!r} has no known peak", hint=f"use one of: {names}")
    tflops = row["tflops"][dtype]
    if tflops is None:
        raise ConfigError(f"{row['name']} has no {dtype} products", hint="use --dtype bfloat16")
    return Gpu(
        name=row["name"],
        bandwidth=row["bandwidth_gb_s"] * 1e9,
        flops=tflops * 1e12,
        memory_bytes=row["memory_gb"] * 1e9,
    )


class Kernel(NamedTuple):
    num_values: float  # of weights or cache that it reads
    flops: float
    reads_cache: bool = False


@dataclass(frozen=True)
class RooflineCosts:
    """`dtype_bytes`: of weights and cache alike."""

    gpu: Gpu
    target: DecoderShape
    drafters: dict[str, DrafterShape | None]  # by method; None: free drafts (n-gram)
    dtype_bytes: int = 2
    assumed: Assumptions = field(default_factory=Assumptions)

    def plain(self, concurrency: int, context: int) -> float:
        return self.verify(0, concurrency, context) + self.assumed.step_overhead

    def speculative(
        self, method: str, k: int, concurrency: int, context: int, nodes: int | None = None
    ) -> float:
        draft = self.draft(method, k, concurrency, context)
        verify = self.verify(k if nodes is None else nodes, concurrency, context)
        return draft + verify + self.assumed.step_overhead

    def verify(self, num_drafts: int, concurrency: int, context: int) -> float:
        """One pass of the target over the newest token and the drafts of each request."""
        rows = num_drafts + 1
        kernels = _decoder_pass(self.target, rows, rows, concurrency, context)
        return self._seconds(kernels) + self._small_kernels(self.target)

    def draft(self, method: str, k: int, concurrency: int, context: int) -> float:
        drafter = self.drafters[method]
        if drafter is None:
            return 0.0
        shape = drafter.decoder
        if drafter.parallel:  # K+1 tokens of the last step, accepted or padding, and K-1 masks
            passes = [_draft_pass(shape, 2 * k, k, concurrency, context)]
        else:  # the first pass takes in the last step's tokens, the others one draft each
            passes = [_draft_pass(shape, k + 1, 1, concurrency, context)]
            passes += [_draft_pass(shape, 1, 1, concurrency, context)] * (k - 1)
        return sum(self._seconds(kernels) + self._small_kernels(shape) for kernels in passes)

    def fits(self, concurrency: int, context: int) -> bool:
        """Whether weights and cache fit the GPU's memory."""
        shapes = [self.target, *(d.decoder for d in self.drafters.values() if d)]
        values = sum(s.num_parameters for s in shapes)
        values += (
            sum(s.num_layers * s.kv_values_per_token() for s in shapes) * concurrency * context
        )
        return values * self.dtype_bytes <= self.gpu.memory_bytes

    def _seconds(self, kernels: list[Kernel]) -> float:
        return sum(max(self._reading(k), self._multiplying(k)) for k in kernels) + (
            len(kernels) * self.assumed.kernel_overhead
        )

    def _reading(self, kernel: Kernel) -> float:
        assumed = self.assumed
        share = assumed.cache_share if kernel.reads_cache else assumed.bandwidth_share
        return kernel.num_values * self.dtype_bytes / (self.gpu.bandwidth * share)

    def _multiplying(self, kernel: Kernel) -> float:
        return kernel.flops / (self.gpu.flops * self.assumed.flops_share)

    def _small_kernels(self, shape: DecoderShape) -> float:
        return shape.num_layers * SMALL_KERNELS * self.assumed.kernel_overhead


def _decoder_pass(
    shape: DecoderShape, rows: int, logit_rows: int, concurrency: int, context: int
) -> list[Kernel]:
    """`rows` of each request through all layers."""
    layer = [*_layer(shape, rows * concurrency), _attention(shape, rows, concurrency, context)]
    logits = _product(shape.hidden_size * shape.vocab_size, logit_rows * concurrency)
    return layer * shape.num_layers + [logits]


def _draft_pass(
    shape: DecoderShape, rows: int, logit_rows: int, concurrency: int, context: int
) -> list[Kernel]:
    """Beside the layers: three aux hidden states to one feature, and a first layer with a q, k, v
    of twice the width."""
    h = shape.hidden_size
    extra = [3 * h * h, shape.layer_products()[0]]
    first = [_product(weights, rows * concurrency) for weights in extra]
    return first + _decoder_pass(shape, rows, logit_rows, concurrency, context)


def _layer(shape: DecoderShape, rows: int) -> Iterator[Kernel]:
    for weights in shape.layer_products():
        yield _product(weights, rows)


def _product(weights: int, rows: int) -> Kernel:
    return Kernel(weights, 2.0 * weights * rows)


def _attention(shape: DecoderShape, rows: int, concurrency: int, context: int) -> Kernel:
    values = concurrency * context * shape.kv_values_per_token()
    products = 4.0 * rows * concurrency * context * shape.num_heads * shape.head_dim
    return Kernel(values, products, reads_cache=True)

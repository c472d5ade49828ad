"""Seconds of one step's parts: plain pass, verification, drafting. Computed from peaks.

A pass is a list of kernels; each takes the longer of reading its bytes and multiplying, and the
time that it takes to start and end. `measured_costs.py` has the same questions answered by a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from peagle.bench.gpus import Assumptions, Gpu
from peagle.bench.shapes import DecoderShape, DrafterShape

SMALL_KERNELS = 4  # of a layer: two norms, rotation with the cache's write, activation


class StepCosts(Protocol):
    """Seconds. `concurrency` requests are decoded at once, each with `context` tokens behind it."""

    def plain(self, concurrency: int, context: int) -> float:
        """A whole step without speculation."""
        ...

    def speculative(self, method: str, k: int, concurrency: int, context: int) -> float:
        """A whole step that drafts k tokens and verifies them."""
        ...


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

    def speculative(self, method: str, k: int, concurrency: int, context: int) -> float:
        draft = self.draft(method, k, concurrency, context)
        return draft + self.verify(k, concurrency, context) + self.assumed.step_overhead

    def verify(self, k: int, concurrency: int, context: int) -> float:
        """One pass of the target over the newest token and k drafts of each request."""
        kernels = _decoder_pass(self.target, k + 1, k + 1, concurrency, context)
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

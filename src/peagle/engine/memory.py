"""How many cache blocks an engine gets, counted from sizes before any is allocated.

On a GPU: what `gpu_memory_utilization` allows, less what is in use once the weights are loaded
(by anybody: another process's memory counts too), less a reserve for passes and graphs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from peagle.config import EngineConfig
from peagle.engine.blocks import BlockAllocator
from peagle.engine.layer_groups import LayerGroups, group_layers
from peagle.errors import ConfigError
from peagle.models.config import DecoderConfig
from peagle.models.drafter import CacheLayout, Drafter
from peagle.models.eagle import EagleNetwork, SharedTables
from peagle.models.experts import LowBitMatrices
from peagle.models.head_config import HeadConfig
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel

CPU_CACHE_BYTES = 2 << 30  # an upper bound: the system hands out pages as they are written first
# Estimates. Graphs keep their passes' memory, beside that of eager steps. Their warm-ups keep
# theirs too: LOGIT_BYTES is generous enough for both.
POOLS = 2
WORKSPACE_BYTES = 512 << 20  # the libraries' workspaces, loaded kernels, the graphs themselves
# float32 logits, filtered, sorted with their places, probabilities, noise.
LOGIT_BYTES = 32

MAX_RESERVED_DRAFTS = 8  # of a chain; who drafts further leaves more room by the utilization
# Trees are verified by coupling alone: logits and a copy or two, a third of LOGIT_BYTES at most.
TREE_LOGIT_SHARE = 3

MORE_ROOM = (
    "raise gpu_memory_utilization, lower max_model_len, max_num_seqs or max_num_batched_tokens, "
    "or use quantization=fp8"
)


class DeviceMemory(NamedTuple):
    total: int
    free: int  # for us


class CacheNeed(NamedTuple):
    block_bytes: int  # in the caches of target and drafter together
    longest: int  # positions of a request: max_model_len, with trees their rows behind it
    per_request: int  # blocks that such a request holds at most, windows considered
    at_once: int  # blocks that all requests could hold at once

    @property
    def least_bytes(self) -> int:
        return self.block_bytes * self.per_request


def make_allocator(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    cache_len: int,  # positions that a request's blocks may have
    groups: LayerGroups,
    probs_shape: tuple[int, int] | None = None,  # kept of each request's drafts
    num_draft_nodes: int | None = None,
) -> BlockAllocator:
    """As many blocks as the memory holds, and no more than could ever be used at once."""
    need = cache_need(target, drafter, config, cache_len, groups)
    device = target.embed_tokens.weight.device
    memory = device_memory(device)
    reserve = 0 if memory is None else step_reserve(target, drafter, config, num_draft_nodes)
    reserve += 4 * (config.max_num_seqs + 1) * math.prod(probs_shape) if probs_shape else 0
    num_blocks = count_blocks(need, config, memory, reserve)
    is_contiguous = device.type != "cuda"
    return BlockAllocator(num_blocks, config.block_size, is_contiguous, groups.windows)


def make_groups(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    cache_len: int,
    num_drafts: int = 0,  # in a step of one request, as a rule
    max_drafts: int = 0,
) -> LayerGroups:
    def decode_rows(num_drafts: int) -> int:
        """A step in flight may accept all; the next one writes as many, and drafts behind them."""
        return 3 * (num_drafts + 1)

    return group_layers(
        target.cache_layout,
        drafter.cache_layout if drafter is not None else None,
        max_blocks=-(-cache_len // config.block_size),
        block_size=config.block_size,
        max_rows=max(config.max_num_batched_tokens, decode_rows(max_drafts)),
        decode_rows=decode_rows(num_drafts),
    )


def cache_need(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    cache_len: int,
    groups: LayerGroups,
) -> CacheNeed:
    layouts = [target.cache_layout]
    if drafter is not None and drafter.cache_layout is not None:
        layouts.append(drafter.cache_layout)
    dtype = target.embed_tokens.weight.dtype
    block_bytes = config.block_size * groups.slot_bytes(layouts, dtype)
    per_request = groups.blocks_for(-(-cache_len // config.block_size))
    return CacheNeed(block_bytes, cache_len, per_request, per_request * config.max_num_seqs)


class ModelMemory(NamedTuple):
    """What a model takes of each dtype's bytes, told from sizes alone."""

    num_parameters: int
    layout: CacheLayout
    num_low_bit: int = 0  # of the parameters
    low_bit_bytes: int = 0  # that these take, with their scales

    def weight_bytes(self, dtype: torch.dtype) -> int:
        plain = self.num_parameters - self.num_low_bit
        return plain * dtype.itemsize + self.low_bit_bytes

    def token_bytes(self, dtype: torch.dtype, *, beyond_windows: bool = False) -> int:
        """Of the cache for one more token; a window that is full has no need of more."""
        grows = [not beyond_windows or window is None for window in self._windows]
        return self.layout.layer_bytes(dtype) * sum(grows)

    def cache_bytes(self, dtype: torch.dtype, num_tokens: int) -> int:
        """For so many tokens, but for what is rounded up to blocks and the rows of a step."""
        kept = (min(window or num_tokens, num_tokens) for window in self._windows)
        return self.layout.layer_bytes(dtype) * sum(kept)

    @property
    def _windows(self) -> tuple[int | None, ...]:
        return self.layout.windows or (None,) * self.layout.num_layers


def target_memory(config: DecoderConfig) -> ModelMemory:
    """Of a native target, its low-bit experts kept so; nothing is allocated."""
    with on_meta():  # its rotary tables are real, whatever the context
        target = TargetModel(dataclasses.replace(config, max_position_embeddings=1))
    kept = [m for m in target.modules() if isinstance(m, LowBitMatrices)]
    low_bit = sum(math.prod(matrices.shape) for matrices in kept)
    stored = [parameter for matrices in kept for parameter in matrices.parameters()]
    num_parameters = _num_parameters(target) - sum(p.numel() for p in stored) + low_bit
    stored_bytes = sum(p.nbytes for p in stored)
    return ModelMemory(num_parameters, target.cache_layout, low_bit, stored_bytes)


def head_memory(config: HeadConfig) -> ModelMemory:
    """Without the tables that it borrows."""
    with on_meta():
        shared = SharedTables(nn.Embedding(1, 1), nn.Linear(1, 1))
        network = EagleNetwork(dataclasses.replace(config, max_position_embeddings=1), shared)
    layout = CacheLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return ModelMemory(_num_parameters(network), layout)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def count_blocks(
    need: CacheNeed, config: EngineConfig, memory: DeviceMemory | None, reserve: int
) -> int:
    """`memory` None: a CPU's. Raises ConfigError where one request of full length does not fit."""
    budget = cache_budget(config, memory, reserve)
    if budget < need.least_bytes:
        raise _too_little(need, config, memory, reserve)
    num_blocks = min(budget // need.block_bytes, need.at_once)
    num_bytes = num_blocks * need.block_bytes
    if memory is not None and num_bytes > memory.free:  # more was asked for than there is
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: the cache takes "
            f"{_gib(num_bytes)}, the GPU has {_gib(memory.free)} free",
            hint="lower kv_cache_memory_bytes, or leave it out",
        )
    return num_blocks


def cache_budget(config: EngineConfig, memory: DeviceMemory | None, reserve: int) -> int:
    """Bytes that the caches may take; below 0 where not even the reserve fits."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if memory is None:
        return CPU_CACHE_BYTES
    in_use = memory.total - memory.free
    return int(memory.total * config.gpu_memory_utilization) - in_use - reserve


def step_reserve(
    target: TargetModel,
    drafter: Drafter | None,
    config: EngineConfig,
    num_draft_nodes: int | None = None,
) -> int:
    """Bytes that steps need beside weights and caches."""
    drafts = drafter.max_speculative_tokens if drafter else 0
    in_chains = config.max_num_seqs * (1 + min(drafts, MAX_RESERVED_DRAFTS))
    in_trees = config.max_num_seqs * (1 + (num_draft_nodes or 0))
    # A step's rows are padded to a graph's shape.
    rows = config.max_num_batched_tokens + max(in_chains, in_trees)
    # The drafter's pass has fewer layers and comes when the target's is over: it finds room.
    passes = activation_bytes(
        target.config,
        itemsize=target.embed_tokens.weight.dtype.itemsize,
        rows=rows,
        sampled_rows=max(in_chains, in_trees // TREE_LOGIT_SHARE),
    )
    return POOLS * passes + WORKSPACE_BYTES


def activation_bytes(sizes: DecoderConfig, *, itemsize: int, rows: int, sampled_rows: int) -> int:
    """What a pass over `rows` holds at the most, if nothing of a layer is freed before its end.

    Every layer's output counts, since any may be an aux hidden state; logits of
    `sampled_rows` alone.
    """
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    kv_heads, head_dim = sizes.largest_kv_row
    queries = sizes.num_attention_heads * max(sizes.head_dim, head_dim)
    projected = queries + 2 * kv_heads * head_dim
    attention = 2 * hidden + 2 * projected + queries  # normed and summed; also rotated; attended
    mlp = 2 * hidden + 3 * inner  # normed and summed; gate, up and their product
    if sizes.experts is not None:
        own = 4 * hidden + 3 * sizes.experts.intermediate_size  # rows sorted, back and weighted
        mlp += sizes.experts.top_k * own
    outputs = sizes.num_hidden_layers * hidden
    in_float32 = 4 * 2 * hidden  # a norm's
    row = (attention + mlp + outputs) * itemsize + in_float32
    return rows * row + sampled_rows * sizes.vocab_size * (itemsize + LOGIT_BYTES)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None on a CPU. What torch keeps of freed tensors is handed back first: it counts as free."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free)


@contextmanager
def reported_shortage(what: str, device: torch.device) -> Iterator[None]:
    """Turns the GPU's out-of-memory into one line; `what` does not fit."""
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{what} does not fit: the GPU has {_gib(free)} free of {_gib(total)}",
            hint="use a smaller model or dtype, a larger GPU, or end what else runs on it",
        ) from None


def _too_little(
    need: CacheNeed, config: EngineConfig, memory: DeviceMemory | None, reserve: int
) -> ConfigError:
    if memory is None or config.kv_cache_memory_bytes is not None:
        budget = cache_budget(config, memory, reserve)
        return ConfigError(
            f"kv_cache_memory_bytes={budget} is too little for one request of "
            f"{need.longest} tokens, which takes {need.least_bytes}",
            hint="raise kv_cache_memory_bytes or lower max_model_len",
        )
    in_use = memory.total - memory.free
    share = config.gpu_memory_utilization
    return ConfigError(
        f"{_gib(in_use + reserve + need.least_bytes)} are needed, gpu_memory_utilization={share} "
        f"gives {_gib(int(memory.total * share))}: {_gib(in_use)} are in use, {_gib(reserve)} are "
        f"for passes, {_gib(need.least_bytes)} for one request of {need.longest} tokens",
        hint=MORE_ROOM,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

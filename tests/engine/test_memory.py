"""Cache blocks from bytes: what is free, what is kept back, what is said when it is too little."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import EngineConfig
from peagle.engine import memory
from peagle.engine.memory import (
    CPU_CACHE_BYTES,
    WORKSPACE_BYTES,
    CacheNeed,
    DeviceMemory,
    activation_bytes,
    cache_budget,
    cache_need,
    count_blocks,
    make_allocator,
    make_groups,
    step_reserve,
)
from peagle.errors import ConfigError
from tests.tiny import drafters, engines
from tests.tiny.models import SHALLOW, VOCAB, head_drafter
from tests.train.live_memory import KernelAttention, LiveBytes

GIB = 1 << 30
NEED = CacheNeed(block_bytes=1 << 20, longest=4000, per_request=250, at_once=250 * 64)


@given(
    total=st.integers(1 << 30, 200 << 30),
    used_share=st.floats(0, 1),
    utilization=st.floats(0.01, 1),
    reserve=st.integers(0, 4 << 30),
)
def test_weights_cache_and_reserve_stay_within_the_share_that_was_allowed(
    total: int, used_share: float, utilization: float, reserve: int
) -> None:
    free = total - int(total * used_share)
    config = EngineConfig(gpu_memory_utilization=utilization)
    have = DeviceMemory(total, free)
    try:
        num_blocks = count_blocks(NEED, config, have, reserve)
    except ConfigError:
        assert cache_budget(config, have, reserve) < NEED.least_bytes
        return
    assert NEED.per_request <= num_blocks <= NEED.at_once
    taken = (total - free) + reserve + num_blocks * NEED.block_bytes
    assert taken <= total * utilization
    one_more_fits = taken + NEED.block_bytes <= int(total * utilization)
    assert num_blocks == NEED.at_once or not one_more_fits


def test_what_is_free_is_used_up_to_what_could_be_used_at_once() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    have = DeviceMemory(total=20 * GIB, free=16 * GIB)
    assert count_blocks(NEED, config, have, reserve=GIB) == 5 * 1024  # 10 - 4 - 1 GiB
    assert count_blocks(NEED._replace(at_once=300), config, have, reserve=GIB) == 300


def test_a_cpu_takes_two_gib_at_the_most() -> None:
    assert CPU_CACHE_BYTES == 2 * GIB
    assert count_blocks(NEED, EngineConfig(), None, 0) == 2048


def test_bytes_that_were_given_are_taken_as_they_are() -> None:
    config = EngineConfig(kv_cache_memory_bytes=300 << 20, gpu_memory_utilization=0.01)
    for have in (None, DeviceMemory(80 * GIB, 79 * GIB)):
        assert count_blocks(NEED, config, have, reserve=GIB) == 300


def test_more_bytes_than_are_free_are_refused_before_they_are_allocated() -> None:
    config = EngineConfig(kv_cache_memory_bytes=6 * GIB)
    with pytest.raises(ConfigError, match=r"takes 6\.00 GiB, the GPU has 5\.00 GiB free"):
        count_blocks(NEED, config, DeviceMemory(80 * GIB, 5 * GIB), 0)


def test_a_model_that_does_not_fit_is_one_line_with_all_figures() -> None:
    have = DeviceMemory(total=16 * GIB, free=2 * GIB)
    with pytest.raises(ConfigError) as caught:
        count_blocks(NEED, EngineConfig(), have, reserve=GIB)
    assert caught.value.message == (
        "15.24 GiB are needed, gpu_memory_utilization=0.9 gives 14.40 GiB: 14.00 GiB are in use, "
        "1.00 GiB are for passes, 0.24 GiB for one request of 4000 tokens"
    )
    assert caught.value.hint is not None
    for way_out in ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "fp8"):
        assert way_out in caught.value.hint


def test_a_given_cache_that_is_too_small_names_its_own_option() -> None:
    config = EngineConfig(kv_cache_memory_bytes=100 << 20)
    for have in (None, DeviceMemory(80 * GIB, 79 * GIB)):
        with pytest.raises(ConfigError, match=r"too little for one request of 4000 tokens") as e:
            count_blocks(NEED, config, have, 0)
        assert e.value.hint == "raise kv_cache_memory_bytes or lower max_model_len"


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.1},
        {"gpu_memory_utilization": float("nan")},
        {"kv_cache_memory_bytes": 0},
        {"quantization": "int4"},
    ],
)
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_a_block_counts_the_caches_of_target_and_drafter() -> None:
    target = SHALLOW.make_target(torch.float32)
    config = EngineConfig(block_size=8, max_num_seqs=3)
    drafter = head_drafter(SHALLOW.make_head(target))
    plain, both = (
        cache_need(target, d, config, 20, make_groups(target, d, config, 20))
        for d in (None, drafter)
    )
    per_layer = 8 * 2 * 2 * 8 * 4  # tokens, keys and values, heads, size of a head, bytes
    assert plain == CacheNeed(2 * per_layer, longest=20, per_request=3, at_once=9)
    assert both == plain._replace(block_bytes=3 * per_layer)


def test_an_engine_takes_what_the_gpu_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = SHALLOW.make_target(torch.float32)
    config = EngineConfig(gpu_memory_utilization=0.75, block_size=4)
    groups = make_groups(target, None, config, 96)
    need = cache_need(target, None, config, 96, groups)
    in_use = GIB
    spare = 30 * need.block_bytes + 5
    limit = in_use + step_reserve(target, None, config) + spare
    total = -(-limit * 4 // 3)
    have = DeviceMemory(total, total - in_use)
    monkeypatch.setattr(memory, "device_memory", lambda device: have)
    assert make_allocator(target, None, config, 96, groups).num_blocks == 30


def test_rows_of_trees_are_reserved_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SHALLOW.make_target(torch.float32)
    have = DeviceMemory(100 * GIB, 100 * GIB)
    monkeypatch.setattr(memory, "device_memory", lambda device: have)
    drafter, reserves = head_drafter(SHALLOW.make_head(target)), []

    def count(need: CacheNeed, config: object, have: object, reserve: int) -> int:
        reserves.append(reserve)
        return need.at_once

    monkeypatch.setattr(memory, "count_blocks", count)
    for nodes in (None, 40):
        engines.make_engine(target, drafter, nodes=nodes)
    assert reserves[0] < reserves[1]


def test_a_pass_never_holds_more_than_was_counted() -> None:
    """Counted against the tensors that the plain modules really make in a pass."""
    target = SHALLOW.make_target(torch.float32)
    rows, sampled = 64, 16
    positions, made = torch.arange(rows), LiveBytes()
    with torch.no_grad(), made:
        out = target(positions % VOCAB, positions, KernelAttention(), (0, 1, 2))
        logits = target.logits(out.hidden[:sampled])
        logits.softmax(-1).sort(-1)
    counted = activation_bytes(target.config, itemsize=4, rows=rows, sampled_rows=sampled)
    assert made.peak <= counted <= 4 * made.peak


def test_the_reserve_grows_with_rows_and_logits() -> None:
    target = SHALLOW.make_target(torch.float32)
    drafter = drafters.random_drafts()
    few = EngineConfig(max_num_seqs=2, max_num_batched_tokens=200)
    plain, speculative = (step_reserve(target, d, few) for d in (None, drafter))
    assert WORKSPACE_BYTES < plain < speculative
    small, large = (step_reserve(target, drafter, few, nodes) for nodes in (2, 40))
    assert speculative == small < large
    more = EngineConfig(max_num_seqs=2, max_num_batched_tokens=400)
    assert step_reserve(target, None, more) > plain
    assert activation_bytes(target.config, itemsize=2, rows=8, sampled_rows=0) < activation_bytes(
        target.config, itemsize=4, rows=8, sampled_rows=0
    )

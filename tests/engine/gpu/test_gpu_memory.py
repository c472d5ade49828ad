"""What an engine takes of a real GPU: no more than it may, no more after a while than at first."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest
import torch

from peagle.config import EngineConfig
from peagle.engine.memory import (
    DeviceMemory,
    cache_need,
    device_memory,
    make_allocator,
    make_groups,
    reported_shortage,
    step_reserve,
)
from peagle.errors import ConfigError
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import engines
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import CONTEXT

from .captured import HEADS, captured_engine, engine_config, exact_engine, models

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MIB = 1 << 20
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(seed=3, max_tokens=9),
    SamplingParams(seed=5, temperature=0.8, top_k=9, top_p=0.9, max_tokens=10),
]
LONG_CONTEXT = 65_532  # a request of that length fills 32 MiB of cache
NUM_BLOCKS, NUM_WAVES = 20, 4  # blocks for two or three requests: others are preempted


class Taken(NamedTuple):
    by_tensors: int
    by_torch: int
    by_anybody: int


def taken() -> Taken:
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return Taken(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free)


def jobs(count: int) -> list[Job]:
    """All at once, more than there are slots."""
    return [Job(p, PARAMS[n % 3]) for n, p in enumerate(prompts(count, seed=7, longest=44))]


def hungry() -> tuple[TargetModel, Drafter]:
    return models("cuda", HEADS["p-eagle"], max_position_embeddings=LONG_CONTEXT)


def share_with(cache_bytes: int, target: TargetModel, drafter: Drafter) -> tuple[float, int]:
    """The utilization that leaves so much for the cache, and how many bytes it is in all."""
    have = _device_memory()
    in_use = have.total - have.free
    reserve = step_reserve(target, drafter, engine_config())
    allowed = in_use + reserve + cache_bytes + 16  # which a product of floats may lose
    return allowed / have.total, allowed


def _device_memory() -> DeviceMemory:
    gc.collect()  # graphs of an earlier engine
    have = device_memory(CUDA)
    assert have is not None
    return have


def test_free_memory_includes_what_torch_only_keeps() -> None:
    before = _device_memory()
    torch.zeros(1 << 28, dtype=torch.uint8, device=CUDA)  # freed at once, kept by torch
    after = _device_memory()
    assert before.total == after.total
    assert abs(after.free - before.free) < 64 * MIB
    assert 0 < after.free < after.total


def bytes_of_a_block(target: TargetModel, drafter: Drafter | None, context: int) -> int:
    given = target, drafter, engine_config(), context
    return cache_need(*given, make_groups(*given)).block_bytes


def test_blocks_are_handed_out_without_reserving() -> None:
    given = *models("cuda", HEADS["p-eagle"]), EngineConfig(), CONTEXT
    allocator = make_allocator(*given, make_groups(*given))
    assert allocator.num_blocks == 64 * CONTEXT // 16  # all that could be used at once
    assert allocator.open_table(CONTEXT).reserved == range(0)


def test_an_engine_with_its_graphs_stays_within_its_share() -> None:
    target, drafter = hungry()
    share, allowed = share_with(64 * MIB, target, drafter)
    before = taken()
    engine = captured_engine(target, drafter, "coupled", gpu_memory_utilization=share)
    block_bytes = bytes_of_a_block(target, drafter, LONG_CONTEXT)
    assert 63 * MIB < engine.allocator.num_blocks * block_bytes <= 64 * MIB
    engines.run(engine, jobs(12))
    assert before.by_anybody + 63 * MIB < taken().by_anybody <= allowed


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    target, drafter = hungry()
    share, _ = share_with(16 * MIB, target, drafter)
    before = taken()
    with pytest.raises(ConfigError, match=r"GiB are needed, gpu_memory_utilization=") as caught:
        captured_engine(target, drafter, "coupled", gpu_memory_utilization=share)
    assert "gpu_memory_utilization" in (caught.value.hint or "")
    too_much = {"kv_cache_memory_bytes": 1 << 50, "max_num_seqs": 1 << 16}  # 2 TiB at once
    with pytest.raises(ConfigError, match=r"the cache takes .* GiB, the GPU has .* GiB free"):
        captured_engine(target, drafter, "coupled", **too_much)
    after = taken()
    assert after.by_tensors == before.by_tensors
    assert after.by_anybody <= before.by_anybody


def test_weights_that_do_not_fit_are_one_line_with_a_hint() -> None:
    with (
        pytest.raises(ConfigError, match=r"the model does not fit: the GPU has .* free") as caught,
        reported_shortage("the model", CUDA),
    ):
        torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)
    assert "smaller model" in (caught.value.hint or "")


def test_a_long_run_takes_no_more_memory_than_its_beginning() -> None:
    target, drafter = models("cuda", HEADS["p-eagle"])
    block_bytes = bytes_of_a_block(target, drafter, 60)
    room = {"max_model_len": 60, "kv_cache_memory_bytes": NUM_BLOCKS * block_bytes}
    engine = captured_engine(target, drafter, "coupled", **room)
    expected = engines.answers_of(engines.run(exact_engine(HEADS["p-eagle"], "coupled"), jobs(30)))
    first = engines.run(engine, jobs(30))
    assert sum(request.num_preemptions for request in first) > 5
    begun, num_graphs = taken(), engine.num_graphs
    for _ in range(NUM_WAVES):
        assert engines.answers_of(engines.run(engine, jobs(30))) == expected
    ended = taken()
    assert engine.num_graphs == num_graphs
    assert ended.by_tensors == begun.by_tensors
    assert ended.by_torch == begun.by_torch
    assert ended.by_anybody <= begun.by_anybody + 4 * MIB

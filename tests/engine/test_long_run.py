"""A hundred requests come and go: memory is that of the start, and nothing is lost."""

from __future__ import annotations

import random

import pytest
import torch

from peagle.engine.blocks import BlockAllocator
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams
from tests.tiny import engines
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

pytestmark = pytest.mark.slow

NUM_REQUESTS = 100
NUM_BLOCKS, BLOCK_SIZE = 24, 4


def small_engine(contiguous: bool, static: bool) -> Engine:
    """Too few blocks for all requests that run at once, so that some are preempted."""
    target = SHALLOW.make_target(torch.float32)
    drafter = head_drafter(SHALLOW.make_head(target))
    room = engines.room_for(NUM_BLOCKS * BLOCK_SIZE, target, drafter)
    engine = engines.make_engine(
        target, drafter, 3, block_size=BLOCK_SIZE, max_model_len=64, static=static, **room
    )
    assert engine.allocator.num_blocks == NUM_BLOCKS
    if not contiguous:
        stack = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, contiguous=False)
        engine.allocator = engine.scheduler.allocator = stack
    return engine


def tensors(engine: Engine) -> list[torch.Tensor]:
    models = engine.runner.models
    assert models.drafting is not None
    caches = (models.model.cache, models.drafting.model.cache)
    own = [t for t in models.state if t is not None]
    return [tensor for c in caches for tensor in (c.keys, c.values)] + own


@pytest.mark.parametrize(("contiguous", "static"), [(True, False), (False, False), (False, True)])
def test_blocks_all_come_back_and_caches_are_allocated_once(contiguous: bool, static: bool) -> None:
    engine = small_engine(contiguous, static)
    before = tensors(engine)
    addresses = [t.data_ptr() for t in before]
    rng = random.Random(7)
    open_requests: list[Request] = []
    preempted = added = 0
    while added < NUM_REQUESTS or engine.has_unfinished:
        while added < NUM_REQUESTS and rng.random() < 0.75:
            open_requests.append(_add(engine, rng, added))
            added += 1
        if open_requests and rng.random() < 0.05:
            engine.abort_request(rng.choice(open_requests))
        engine.step()
        engine.allocator.check([r.table for r in open_requests if r.table is not None])
        preempted += sum(r.num_preemptions for r in open_requests if r.finish_reason)
        open_requests = [r for r in open_requests if r.finish_reason is None]

    assert preempted > 0
    assert engine.allocator.num_free == NUM_BLOCKS
    engine.allocator.check([])
    after = tensors(engine)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert [t.data_ptr() for t in after] == addresses
    _takes_all(engine.allocator, contiguous)


def _add(engine: Engine, rng: random.Random, number: int) -> Request:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randint(1, 16), seed=number
    )
    return engine.add_request(str(number), prompt, params)


def _takes_all(allocator: BlockAllocator, contiguous: bool) -> None:
    """One table gets every block, in one piece where pieces count."""
    table = allocator.open_table(NUM_BLOCKS * BLOCK_SIZE)
    assert allocator.grow(table, NUM_BLOCKS * BLOCK_SIZE)
    assert sorted(table.blocks) == list(range(NUM_BLOCKS))
    assert table.contiguous or not contiguous
    allocator.close_table(table)

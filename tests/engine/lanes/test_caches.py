"""What a lane's blocks hold equals recomputation, after every step and whatever was rejected."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.seats import Seat
from torch import Tensor

from peagle.engine.kv_cache import PagedKVCache
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel

from .. import tiny
from ..test_cache_after_rejection import HEADS, RecordingAttention
from ..tiny import GREEDY, Job
from .lane_tiny import Script, at_lane, known, scripted_engine

TOLERANCE = 1e-10


@cache
def target() -> TargetModel:
    return tiny.make_target()


def check(cache: PagedKVCache, blocks: Tensor, block_size: int, naive: RecordingAttention) -> None:
    positions = torch.arange(len(naive.keys[0]))
    slots = blocks[positions // block_size].long() * block_size + positions % block_size
    for kept, made in ((cache.keys, naive.keys), (cache.values, naive.values)):
        torch.testing.assert_close(kept[:, slots], torch.stack(made), rtol=0, atol=TOLERANCE)


def check_lane(engine: LaneEngine, network: EagleNetwork, seat: Seat, answer: list[int]) -> int:
    """Compares up to what the device has computed, which the host may not know yet."""
    state = engine.models.state
    blocks, size = state.block_tables[seat.lane], engine.allocator.block_size
    n = int(state.num_computed[seat.lane])
    naive = RecordingAttention(n)
    engine.target(torch.tensor(answer[:n]), torch.arange(n), naive)
    check(engine.runner.target_cache, blocks, size, naive)
    assert int(state.last_tokens[seat.lane]) == answer[n]
    start = int(state.draft_starts[seat.lane])
    check_pending(engine, network, seat, answer, start, n)
    if start:
        taps = tiny.naive_taps(
            engine.target, answer[:start], network.config.aux_hidden_state_layer_ids
        )
        naive = RecordingAttention(start)
        embeddings = network.embed(torch.tensor(answer[1 : start + 1]))
        network(embeddings, network.features(taps), torch.arange(start), naive)
        assert engine.runner.draft_cache is not None
        check(engine.runner.draft_cache, blocks, size, naive)
    return n - start


def check_pending(
    engine: LaneEngine, network: EagleNetwork, seat: Seat, answer: list[int], start: int, end: int
) -> None:
    state, count = engine.models.state, end - start
    taps = tiny.naive_taps(engine.target, answer[:end], network.config.aux_hidden_state_layer_ids)
    kept = state.pending_taps[seat.lane, :count]
    torch.testing.assert_close(kept, taps[start:], rtol=0, atol=TOLERANCE)
    assert state.pending_tokens[seat.lane, :count].tolist() == answer[start + 1 : end + 1]


@pytest.mark.parametrize("name", HEADS)
def test_caches_and_pending_rows_equal_recomputation_after_every_step(name: str) -> None:
    jobs = [Job(p, GREEDY) for p in tiny.prompts(3, seed=8, longest=24)]
    answers = known(target(), jobs)
    network = tiny.make_head(target(), **HEADS[name])
    script = Script(answers, seed=2)
    engine = scripted_engine(
        target(), tiny.head_drafter(network), script, 5, max_num_batched_tokens=16
    )
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    pending = set()
    while engine.has_unfinished:
        engine.step()
        for seat in engine.seating.seats.values():
            if at_lane(engine, "num_computed", seat):
                answer = answers[requests.index(seat.request)]
                pending.add(check_lane(engine, network, seat, answer))
    assert len(pending) > 2  # steps that accepted none, some, all

"""Few blocks, few lanes: requests are sent back, wait, and still say the same."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peagle.engine.lanes.clock import DeviceClock
from peagle.engine.lanes.seats import BLOCKS_AHEAD, Seating
from peagle.engine.lanes.table import LaneTable

from peagle.engine.blocks import BlockAllocator
from peagle.engine.kv_cache import slot_bytes
from peagle.engine.request import Request
from peagle.engine.runner import target_layout
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import Script, at_lane, check_naive, idle, known, lane_engine, scripted_engine

LONGEST = 40


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(method: str) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), method))


def room_for(num_tokens: int, drafter: Drafter | None) -> dict[str, Any]:
    """Options of an engine whose caches hold that many tokens."""
    dtype = target().embed_tokens.weight.dtype
    size = slot_bytes(target_layout(target()), dtype)
    if drafter is not None and drafter.cache_layout is not None:
        size += slot_bytes(drafter.cache_layout, dtype)
    return {"kv_cache_memory_bytes": num_tokens * size, "max_model_len": LONGEST}


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("spare", [0, 8, 20])
def test_preempted_requests_say_the_same(method: str, spare: int) -> None:
    params = [GREEDY, SamplingParams(seed=4, top_k=12, max_tokens=20, ignore_eos=True)]
    texts = tiny.prompts(6, seed=7, longest=16)
    jobs = [Job(p, params[n % 2], joins=n // 2) for n, p in enumerate(texts)]
    options = room_for(LONGEST + spare, head(method))
    script = Script(known(target(), jobs))
    engine = scripted_engine(target(), head(method), script, 5, block_size=2, **options)
    requests = tiny.run(engine, jobs)
    check_naive(target(), requests, jobs)
    assert sum(r.num_preemptions for r in requests) > 0
    assert idle(engine)


def test_a_request_is_sent_back_while_its_steps_are_in_flight() -> None:
    engine = lane_engine(target(), None, block_size=1, **room_for(44, None))
    old, young = (engine.add_request(str(n), [n + 1] * 10, GREEDY) for n in range(2))
    in_flight = 0
    while engine.has_unfinished:
        seat = engine.seating.seat_of(young)
        before = 0 if seat is None else at_lane(engine, "in_flight", seat)
        engine.step()
        if seat is not None and seat.closed and young.finish_reason is None:
            in_flight += before
    assert in_flight > 0
    assert young.num_preemptions > 0
    check_naive(target(), [old, young], [Job([n + 1] * 10, GREEDY) for n in range(2)])


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    k=st.integers(1, 7),
    spare=st.integers(0, 30),
    seqs=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8]),
)
def test_any_shortage(seed: int, k: int, spare: int, seqs: int, block_size: int) -> None:
    texts = tiny.prompts(5, seed, longest=20)
    jobs = [Job(p, dataclasses.replace(GREEDY, max_tokens=4 * n + 1)) for n, p in enumerate(texts)]
    blocks = -(-(LONGEST + spare) // block_size)
    options = room_for(blocks * block_size, head("p-eagle"))
    options |= {"max_num_seqs": seqs, "block_size": block_size}
    script = Script(known(target(), jobs), seed)
    engine = scripted_engine(target(), head("p-eagle"), script, k, **options)
    check_naive(target(), tiny.run(engine, jobs), jobs)
    assert idle(engine)


def test_more_requests_than_lanes() -> None:
    jobs = [Job(p, dataclasses.replace(GREEDY, max_tokens=5)) for p in tiny.prompts(7)]
    engine = lane_engine(target(), head("eagle3"), 2, max_num_seqs=2)
    check_naive(target(), tiny.run(engine, jobs), jobs)
    assert idle(engine)


def request(length: int, max_tokens: int, k: int) -> Request:
    return Request(
        request_id="0",
        prompt_token_ids=[1] * length,
        params=GREEDY,
        seed=0,
        max_tokens=max_tokens,
        num_speculative_tokens=k,
        stop_token_ids=frozenset(),
    )


@given(
    length=st.integers(1, 30),
    max_tokens=st.integers(1, 30),
    k=st.integers(0, 7),
    accepted=st.lists(st.integers(0, 7), max_size=12),
    behind=st.integers(0, 3),
)
def test_reach_covers_what_the_device_writes_however_far_behind_the_host_is(
    length: int, max_tokens: int, k: int, accepted: list[int], behind: int
) -> None:
    """The device's own loop, with the host `behind` steps behind it."""
    table, limit, device = LaneTable(1, k), length + max_tokens, length
    table.limits[0], table.num_computed[0], table.per_step[0] = limit, length, k + 1
    unread: list[int] = []
    for kept in accepted:
        if not table.ready()[0]:
            assert device + 1 >= limit or unread
            break
        running = device + 1 < limit
        drafts = max(min(k, limit - device - 2), 0)
        if running:
            assert device + drafts + 1 <= table.reach()[0]
        new = min(kept, drafts) + 1 if running else 0
        device += new
        table.in_flight[0] += 1
        unread.append(new)
        while len(unread) > behind:
            table.num_computed[0] += unread.pop(0)
            table.in_flight[0] -= 1
    assert device < limit


def test_the_oldest_is_never_sent_back_for_a_younger() -> None:
    allocator = BlockAllocator(12, 1)
    seating = Seating(allocator, 4, 7, frozenset(), DeviceClock(SpecDecodeStats()))
    requests = [request(3, 20, 0) for _ in range(2)]
    seating.waiting.extend(requests)
    seating.admit()
    old, young = seating.seats.values()
    seating.table.num_computed[[old.lane, young.lane]] = old.length, 9
    seating.make_room(young)  # there is not enough: it goes itself
    assert young.closed
    assert not old.closed
    assert list(seating.waiting) == [requests[1]]
    assert requests[1].num_preemptions == 1


@pytest.mark.parametrize(("num_blocks", "prompt", "count"), [(8, 62, 2), (200, 382, 8)])
def test_blocks_taken_ahead_keep_nobody_from_a_seat(
    num_blocks: int, prompt: int, count: int
) -> None:
    """16 tokens a block: the requests' own blocks are exactly those that there are, or almost."""
    allocator = BlockAllocator(num_blocks, 16)
    seating = Seating(allocator, 64, 0, frozenset(), DeviceClock(SpecDecodeStats()))
    seating.waiting.extend(request(prompt, 256, 0) for _ in range(count))
    seating.admit()
    assert len(seating.seats) == count


def test_plenty_of_blocks_are_taken_at_once_and_few_are_not() -> None:
    for num_blocks, expected in ((1000, 1 + BLOCKS_AHEAD), (8, 1 + 7 // 4)):
        seating = Seating(
            BlockAllocator(num_blocks, 16), 4, 0, frozenset(), DeviceClock(SpecDecodeStats())
        )
        seating.waiting.append(request(3, 1000, 0))
        seating.admit()
        (seat,) = seating.seats.values()
        assert seat.request.table is not None
        assert len(seat.request.table.blocks) == expected
        assert seating.table.capacity[seat.lane] == expected * 16


def test_a_step_that_just_fits_sends_nobody_back() -> None:
    allocator = BlockAllocator(20, 1)
    seating = Seating(allocator, 4, 7, frozenset(), DeviceClock(SpecDecodeStats()))
    seating.waiting.append(request(3, 20, 0))
    seating.admit()
    (seat,) = seating.seats.values()
    seating.table.num_computed[seat.lane] = 19
    seating.make_room(seat)  # all 20: no block is left to be taken ahead
    assert not seat.closed
    assert seating.table.capacity[seat.lane] == 20


def test_admission_waits_for_blocks_and_keeps_the_order() -> None:
    allocator = BlockAllocator(10, 2)
    seating = Seating(allocator, 4, 7, frozenset(), DeviceClock(SpecDecodeStats()))
    long, short = request(30, 5, 0), request(1, 2, 0)
    seating.waiting.extend([long, short])
    seating.admit()
    assert not seating.seats
    assert allocator.num_free == 10
    assert list(seating.waiting) == [long, short]

"""The scheduler alone, with a device played by ten lines: budget, order, blocks, preemption."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.blocks import BlockAllocator, BlockTable
from peagle.engine.clock import Clock
from peagle.engine.host_batch import HostBatch
from peagle.engine.request import Request, Status
from peagle.engine.scheduler import BLOCKS_AHEAD, Schedule, Scheduler, Slot
from peagle.sampling_params import SamplingParams
from peagle.speculation.draft_limit import draft_limit
from peagle.speculation.statistics import SpecDecodeStats

MAX_MODEL_LEN = 30
MAX_DRAFTS = 8


def make_request(
    num_prompt: int, max_tokens: int, k: int = 0, name: str = "0", longest: int = MAX_MODEL_LEN
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[0] * num_prompt,
        params=SamplingParams(),
        seed=0,
        max_tokens=min(max_tokens, longest - num_prompt),
        num_speculative_tokens=k,
        stop_token_ids=frozenset(),
    )


def make_scheduler(
    num_blocks: int = 30, block_size: int = 1, seqs: int = 4, budget: int = 16
) -> Scheduler:
    allocator = BlockAllocator(num_blocks, block_size)
    clock = Clock(SpecDecodeStats())
    return Scheduler(allocator, seqs, budget, MAX_DRAFTS, frozenset(), clock)


class OnDevice(NamedTuple):
    """What a device knows of a slot."""

    num_computed: int
    num_drafts: int
    capacity: int


class Launched(NamedTuple):
    slot: Slot
    num_new: int


class Device:
    """Plays engine and device: `accept(drafts)` of a step's drafts are accepted, and the host
    reads reports `lag` steps late."""

    def __init__(self, scheduler: Scheduler, accept: Callable[[int], int], lag: int = 0) -> None:
        self.scheduler, self.accept, self.lag = scheduler, accept, lag
        self.state: dict[int, OnDevice] = {}
        self.unread: deque[list[Launched]] = deque()
        self.num_drafts: list[tuple[Request, int]] = []  # verified, by step
        self.highest: dict[int, int] = {}  # end of the positions written, by slot

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        for slot in schedule.opened:
            self.state[slot.index] = OnDevice(slot.num_known - 1, 0, 0)
        for slot in schedule.grown:
            capacity = table_of(slot).capacity
            self.state[slot.index] = self.state[slot.index]._replace(capacity=capacity)
        decoding = zip(schedule.slots.tolist(), schedule.caps.tolist(), strict=True)
        step = [self._decode(self.scheduler.running[n], cap) for n, cap in decoding]
        self.scheduler.batch.in_flight[schedule.slots] += 1
        self.unread.append(step)
        while len(self.unread) > (self.lag if schedule else 0):
            self._read(self.unread.popleft())
        return schedule

    def _decode(self, slot: Slot, cap: int) -> Launched:
        computed, drafts, capacity = self.state[slot.index]
        limit = int(self.scheduler.batch.limits[slot.index])
        if computed + 1 >= limit:
            return Launched(slot, 0)
        drafts = max(min(drafts, cap, capacity - computed - 1), 0)
        self.num_drafts.append((slot.request, drafts))
        assert computed + drafts + 1 <= capacity
        num_new = self.accept(drafts) + 1
        ahead = limit_of(slot.request, computed + num_new + 1, limit, capacity)
        ends = [computed + drafts + 1, computed + num_new]
        if ahead:  # the last draft's row
            ends.append(computed + num_new + 1 + ahead - 2)
        self.highest[slot.index] = max(ends)
        assert max(ends) <= capacity
        self.state[slot.index] = OnDevice(computed + num_new, ahead, capacity)
        return Launched(slot, num_new)

    def _read(self, step: list[Launched]) -> None:
        batch = self.scheduler.batch
        for slot, num_new in step:
            if slot.closed:
                continue
            batch.in_flight[slot.index] -= 1
            batch.num_computed[slot.index] += num_new
            request = slot.request
            request.token_ids += [1] * num_new
            if request.num_outputs == request.max_tokens:
                request.finish("length")
                self.scheduler.finish(request)


def limit_of(request: Request, num_tokens: int, limit: int, capacity: int) -> int:
    values = (request.num_speculative_tokens, num_tokens, limit, capacity)
    return int(draft_limit(*(torch.tensor(v) for v in values), max_draft_tokens=1000))


def table_of(slot: Slot) -> BlockTable:
    assert slot.request.table is not None
    return slot.request.table


def rejecting(drafts: int) -> int:
    return 0


def accepting(drafts: int) -> int:
    return drafts


def decoding(
    scheduler: Scheduler, *shapes: tuple[int, int, int], accept: Callable[[int], int] = rejecting
) -> tuple[Device, list[Request]]:
    """Requests whose prompts have been computed, with one output each."""
    requests = [make_request(*shape, name=str(n)) for n, shape in enumerate(shapes)]
    for request in requests:
        scheduler.add(request)
    device = Device(scheduler, accept)
    device.step()
    assert all(r.num_outputs == 1 for r in requests)
    return device, requests


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 29), st.integers(1, 20), st.integers(0, MAX_DRAFTS)),
        min_size=1,
        max_size=9,
    ),
    block_size=st.integers(1, 4),
    spare=st.integers(0, 12),
    seqs=st.integers(1, 5),
    budget=st.integers(1, 24),  # even fewer rows than sequences
    lag=st.integers(0, 2),
    seed=st.integers(0, 10),
)
def test_every_request_finishes_within_budget_and_blocks_however_late_the_host_reads(
    shapes: list[tuple[int, int, int]],
    block_size: int,
    spare: int,
    seqs: int,
    budget: int,
    lag: int,
    seed: int,
) -> None:
    num_blocks = -(-MAX_MODEL_LEN // block_size) + spare
    scheduler = make_scheduler(num_blocks, block_size, seqs, budget)
    rng = random.Random(seed)
    device = Device(scheduler, lambda drafts: rng.randint(0, drafts), lag)
    requests = [make_request(*shape, name=str(n)) for n, shape in enumerate(shapes)]
    arriving = list(requests)
    prefilled: dict[Slot, int] = {}
    first_opened: list[Request] = []
    for _ in range(3000):
        if arriving and rng.random() < 0.5:
            scheduler.add(arriving.pop(0))
        before = list(scheduler.running.values())
        num_preempted = sum(r.num_preemptions for r in requests)
        schedule = device.step()
        check_schedule(scheduler, schedule, prefilled)
        first_opened += [s.request for s in schedule.opened if s.request not in first_opened]
        if sum(r.num_preemptions for r in requests) > num_preempted:
            assert not schedule.opened  # the victim would come straight back
            assert not before[0].closed or before[0].request.finish_reason  # never the oldest
        assert schedule or not before or device.lag, "a step without work while someone runs"
        if not scheduler.has_unfinished and not arriving:
            break
    assert not scheduler.has_unfinished
    assert all(r.num_outputs == r.max_tokens for r in requests)
    assert first_opened == requests  # first come, first served
    assert scheduler.allocator.num_free == num_blocks
    assert sorted(scheduler._free) == list(range(seqs))


def check_schedule(scheduler: Scheduler, schedule: Schedule, prefilled: dict[Slot, int]) -> None:
    slots, caps = schedule.slots.tolist(), schedule.caps.tolist()
    num_rows = len(slots) + sum(caps) + sum(c.num_rows for c in schedule.chunks)
    assert num_rows <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len(set(slots)) == len(slots)
    assert all(cap >= 0 for cap in caps)
    for chunk in schedule.chunks:
        assert chunk.num_rows > 0
        assert chunk.first == prefilled.get(chunk.slot, 0)  # one behind the other, none twice
        prefilled[chunk.slot] = chunk.first + chunk.num_rows
        assert prefilled[chunk.slot] < chunk.slot.num_known  # the newest token decodes
        assert chunk.slot.closed or prefilled[chunk.slot] <= table_of(chunk.slot).capacity
    for slot, cap in zip(slots, caps, strict=True):
        running = scheduler.running.get(slot)  # may have ended in this very step
        if running is not None:
            assert prefilled.get(running, 0) == running.num_known - 1
            assert cap <= running.request.num_speculative_tokens
    scheduler.allocator.check([table_of(s) for s in scheduler.running.values()])
    assert all(r.table is None and r.status is Status.WAITING for r in scheduler.waiting)
    serials = [s.serial for s in scheduler.running.values()]
    assert serials == sorted(serials)
    names = [s.request.request_id for s in scheduler.running.values()]
    order = [int(n) for n in (*names, *(r.request_id for r in scheduler.waiting))]
    assert order == sorted(order)


@settings(max_examples=60, deadline=None)
@given(
    num_prompt=st.integers(1, 20),
    max_tokens=st.integers(1, 60),
    k=st.integers(0, MAX_DRAFTS),
    lag=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_with_plenty_of_blocks_no_draft_is_given_up(
    num_prompt: int, max_tokens: int, k: int, lag: int, seed: int
) -> None:
    """So `reach` covers what the device writes, its draft rows too, however late the host reads."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=100, budget=64)
    scheduler._tokens_ahead = lambda: 0  # type: ignore[method-assign]  # not one block to spare
    device = Device(scheduler, lambda drafts: rng.randint(0, drafts), lag)
    request = make_request(num_prompt, max_tokens, k, longest=100)
    scheduler.add(request)
    num_tokens, new = num_prompt, 0
    while scheduler.has_unfinished:
        seen = len(device.num_drafts)
        state = device.state.get(0)
        device.step()
        for _, drafts in device.num_drafts[seen:]:
            num_tokens = num_prompt if state is None else state.num_computed + 1
            expected = min(k, num_prompt + request.max_tokens - num_tokens - 1)
            assert drafts == (0 if state is None else max(expected, 0))
            new += 1
    assert new > 0


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_reach_is_no_more_than_the_device_may_write(k: int, lag: int) -> None:
    """Where all drafts are accepted, steps in flight included, its last row is the last place."""
    scheduler = make_scheduler(num_blocks=200, budget=64)
    device = Device(scheduler, accepting, lag)
    scheduler.add(make_request(3, 150, k, longest=200))
    for _ in range(6):
        reach = int(scheduler.batch.reach()[0])
        device.step()
    assert device.highest[0] == reach


def test_start_and_reach_count_steps_in_flight_and_end_at_the_limit() -> None:
    batch = HostBatch(3, MAX_DRAFTS)
    batch.num_computed[:], batch.per_step[:], batch.max_capacity[:] = 10, (5, 5, 1), (100, 16, 100)
    batch.draft_rows[:] = 3, 3, 0
    assert batch.start().tolist() == [10, 10, 10]
    assert batch.reach().tolist() == [10 + 5 + 3, 16, 11]
    batch.in_flight[:] = 2
    assert batch.start().tolist() == [20, 20, 12]
    assert batch.reach(np.array([0, 2])).tolist() == [20 + 5 + 3, 13]
    batch.num_rows[:] = 6, 5, 12  # trees may have more rows than what their drafts reach
    assert batch.reach(np.array([0, 2])).tolist() == [20 + 5 + 3, 12 + 12]


def test_a_slot_that_steps_in_flight_are_sure_to_end_is_not_launched_again() -> None:
    batch = HostBatch(4, MAX_DRAFTS)
    batch.decodes[:] = 1, 1, 1, 0
    batch.num_computed[:], batch.limits[:] = 10, (12, 13, 12, 20)
    batch.in_flight[:] = 0, 1, 1, 0
    assert batch.ready().tolist() == [True, True, False, False]


def test_every_decoding_request_gets_its_row_before_any_gets_drafts() -> None:
    scheduler = make_scheduler(num_blocks=60, budget=6)
    decoding(scheduler, (2, 20, 8), (2, 20, 8), (2, 20, 8))
    schedule = scheduler.schedule()
    assert schedule.slots.tolist() == [0, 1, 2]
    assert schedule.caps.tolist() == [3, 0, 0]


def test_drafts_go_to_the_oldest_whatever_slots_they_have() -> None:
    scheduler = make_scheduler(num_blocks=60)
    device, (first, *_) = decoding(scheduler, (2, 20, 3), (2, 20, 3), (1, 20, 3))
    first.finish("abort")
    scheduler.finish(first)
    scheduler.add(make_request(1, 20, 3, name="3"))
    device.step()
    scheduler.max_num_batched_tokens = 6
    schedule = scheduler.schedule()
    assert scheduler.running[0].request.request_id == "3"  # the youngest, in the first slot
    assert schedule.slots.tolist() == [0, 1, 2]
    assert schedule.caps.tolist() == [0, 3, 0]


def test_a_budget_that_is_just_enough_caps_nobody() -> None:
    for budget, caps in ((8, [3, 3]), (7, [3, 2])):
        scheduler = make_scheduler(num_blocks=60, budget=budget)
        decoding(scheduler, (2, 20, 3), (2, 20, 3))
        assert scheduler.schedule().caps.tolist() == caps


def test_drafts_leave_half_of_the_rows_to_prompts_that_wait() -> None:
    scheduler = make_scheduler(num_blocks=90, budget=18)
    decoding(scheduler, (2, 20, 8), (2, 20, 8))
    scheduler.add(make_request(30, 20, 8, name="long"))
    schedule = scheduler.schedule()
    assert schedule.caps.tolist() == [8, 0]
    assert [chunk.num_rows for chunk in schedule.chunks] == [8]


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=64)
    device, requests = decoding(scheduler, (6, 20, 8), (6, 20, 8))
    asked: set[int] = set()
    while not sum(r.num_preemptions for r in requests):
        seen = len(device.num_drafts)
        device.step()
        asked |= {drafts for r, drafts in device.num_drafts[seen:] if r is requests[1]}
    assert {0, 8} <= asked
    # All blocks were in use, and neither had a place for its newest token.
    assert requests[0].num_tokens + requests[1].num_tokens >= 30


def test_the_last_free_blocks_go_to_the_oldest() -> None:
    scheduler = make_scheduler(num_blocks=15 + 15 + 7, budget=64)
    _, (old, young) = decoding(scheduler, (6, 20, 8), (6, 20, 8))
    scheduler.schedule()  # a step of either may write up to position 22
    assert [len(r.table.blocks) for r in (old, young) if r.table] == [22, 15]


def test_a_step_that_just_fits_preempts_nobody() -> None:
    scheduler = make_scheduler(num_blocks=20, budget=32)
    device, requests = decoding(scheduler, (9, 20, 0), (9, 20, 0))
    device.step()  # 20 positions in 20 blocks
    assert [r.num_preemptions for r in requests] == [0, 0]
    assert scheduler.allocator.num_free == 0
    device.step()
    assert [r.num_preemptions for r in requests] == [0, 1]


def test_the_youngest_is_preempted_and_waits_in_front_of_later_ones() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=32)
    device, (first, second, third) = decoding(scheduler, (5, 20, 0), (5, 20, 0), (15, 10, 0))
    later = make_request(15, 3, name="3")
    scheduler.add(later)
    while third.num_preemptions == 0:
        device.step()
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    assert list(scheduler.waiting) == [third, later]
    assert third.table is None
    assert third.status is Status.WAITING


def test_a_request_that_is_itself_the_youngest_is_preempted_for_nobody_older() -> None:
    scheduler = make_scheduler(num_blocks=12, budget=32)
    _, (old, young) = decoding(scheduler, (3, 20, 0), (3, 20, 0))
    batch, slot = scheduler.batch, scheduler.slot_of(young)
    assert slot is not None
    batch.num_computed[slot.index] = 9  # it alone lacks blocks
    schedule = scheduler.schedule()
    assert schedule.slots.tolist() == [0]
    assert schedule.grown == []  # what it may have got is back
    assert slot.closed
    assert scheduler.slot_of(old) is not None
    assert list(scheduler.waiting) == [young]


def test_a_preempted_request_comes_back_with_all_its_tokens_as_prompt() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=64)
    device, requests = decoding(scheduler, (6, 22, 2), (6, 18, 2))
    young = requests[1]
    while not young.num_preemptions:
        device.step()
    num_known = young.num_tokens
    assert young.num_outputs > 1
    while young.table is None:
        schedule = device.step()
    (chunk,) = schedule.chunks
    assert (chunk.first, chunk.num_rows) == (0, num_known - 1)
    assert chunk.slot.num_known == num_known
    while scheduler.has_unfinished:
        device.step()
    assert young.num_outputs == 18


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(7, 20), (7, 3), (7, 1), (1, 1)])
def test_admission_takes_exactly_the_blocks_of_known_tokens_and_a_first_step(
    num_prompt: int, max_tokens: int, k: int
) -> None:
    needed = min(num_prompt + k + 1, num_prompt + max_tokens)
    for num_blocks, is_admitted in ((needed, True), (needed - 1, False)):
        scheduler = make_scheduler(num_blocks=num_blocks)
        request = make_request(num_prompt, max_tokens, k)
        scheduler.add(request)
        schedule = scheduler.schedule()
        assert [s.request for s in schedule.opened] == [request] * is_admitted
        assert schedule.grown == schedule.opened
        assert bool(schedule) == is_admitted
        assert scheduler.allocator.num_free == (0 if is_admitted else num_blocks)


def test_admission_keeps_the_order_though_a_later_request_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=10, block_size=2)
    long, short = make_request(25, 5), make_request(1, 2)
    scheduler.add(long)
    scheduler.add(short)
    assert not scheduler.schedule()
    assert list(scheduler.waiting) == [long, short]
    assert scheduler.allocator.num_free == 10


def test_nobody_is_admitted_without_a_slot_or_a_row() -> None:
    for seqs, budget, admitted in ((1, 64, 1), (4, 64, 3), (4, 5, 1), (4, 6, 2), (4, 12, 3)):
        scheduler = make_scheduler(num_blocks=60, seqs=seqs, budget=budget)
        for n in range(3):
            scheduler.add(make_request(5, 3, name=str(n)))
        assert len(scheduler.schedule().opened) == admitted, (seqs, budget)


def test_rows_promised_to_prompts_that_go_on_let_nobody_else_in() -> None:
    scheduler = make_scheduler(num_blocks=90, budget=6)
    scheduler.add(make_request(12, 3, name="0"))
    scheduler.add(make_request(4, 3, name="1"))
    opened = [len(scheduler.schedule().opened) for _ in range(3)]
    assert opened == [1, 0, 1]  # 6 of 12 rows; the other 6; the newest token beside a new prompt


def test_a_prompt_and_its_newest_token_stand_in_one_step_where_they_fit() -> None:
    for budget, chunk, decodes in ((8, 7, True), (7, 7, False), (6, 6, False)):
        scheduler = make_scheduler(budget=budget)
        scheduler.add(make_request(8, 5, 3))
        schedule = scheduler.schedule()
        assert [c.num_rows for c in schedule.chunks] == [chunk]
        assert schedule.slots.tolist() == [0] * decodes
        assert schedule.caps.tolist() == [0] * decodes  # there are no drafts yet


def test_a_prompt_of_one_token_has_no_rows_but_its_newest() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, 5, 3))
    schedule = scheduler.schedule()
    assert schedule.chunks == []
    assert schedule.slots.tolist() == [0]


def test_prefill_goes_on_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler(num_blocks=90, budget=6)
    device, _ = decoding(scheduler, (2, 20, 2))
    long = make_request(17, 5, 2, name="1")
    scheduler.add(long)
    chunks = []
    while long.num_outputs == 0:
        schedule = device.step()
        assert schedule.slots.tolist()[0] == 0
        chunks += [c.num_rows for c in schedule.chunks]
    assert chunks == [3, 3, 3, 3, 3, 1]


def test_an_admitted_request_holds_blocks_for_its_whole_prompt() -> None:
    """So prefill, once begun, never has to preempt anyone."""
    scheduler = make_scheduler(num_blocks=20, budget=6)
    request = make_request(17, 5, 2)
    scheduler.add(request)
    (chunk,) = scheduler.schedule().chunks
    assert chunk.num_rows == 6
    assert table_of(chunk.slot).capacity == 20


@pytest.mark.parametrize(("num_blocks", "prompt", "count"), [(8, 62, 2), (200, 382, 8)])
def test_blocks_taken_ahead_keep_nobody_out(num_blocks: int, prompt: int, count: int) -> None:
    """16 tokens a block: the requests' own blocks are exactly those that there are, or almost."""
    scheduler = make_scheduler(num_blocks, 16, seqs=64, budget=4096)
    for _ in range(count):
        scheduler.add(make_request(prompt, 256, longest=1000))
    assert len(scheduler.schedule().opened) == count


def test_plenty_of_blocks_are_taken_at_once_and_few_are_not() -> None:
    for num_blocks, expected in ((1000, 1 + BLOCKS_AHEAD), (8, 1 + 7 // 4)):
        scheduler = make_scheduler(num_blocks, 16)
        scheduler.add(make_request(3, 1000, longest=2000))
        (slot,) = scheduler.schedule().opened
        assert len(table_of(slot).blocks) == expected
        assert scheduler.batch.capacity[slot.index] == expected * 16


def test_no_blocks_are_taken_ahead_while_a_request_waits_for_some() -> None:
    scheduler = make_scheduler(40, 1, seqs=2, budget=64)
    scheduler.add(make_request(3, 20, longest=100))
    scheduler.add(make_request(50, 20, longest=100, name="1"))
    (slot,) = scheduler.schedule().opened
    assert table_of(slot).capacity == 4
    alone = make_scheduler(40, 1, seqs=1, budget=64)  # here it waits for a slot
    alone.add(make_request(3, 20, longest=100))
    alone.add(make_request(50, 20, longest=100, name="1"))
    (slot,) = alone.schedule().opened
    assert table_of(slot).capacity > 4


def test_a_slot_and_its_outcomes_begin_anew_for_the_next_request() -> None:
    scheduler = make_scheduler(seqs=1)
    _, (first,) = decoding(scheduler, (2, 20, 3))
    batch = scheduler.batch
    batch.outcomes[0, 3, 2, 0] = 4
    batch.in_flight[0] = 1
    first.finish("abort")
    scheduler.finish(first)
    assert first.stats.num_accepted_tokens == 8
    assert not batch.outcomes.any()
    assert not batch.ready().any()
    second = make_request(3, 5, name="1")
    scheduler.add(second)
    (slot,) = scheduler.schedule().opened
    assert (slot.index, slot.serial) == (0, 2)
    assert batch.in_flight[0] == 0
    assert batch.num_computed[0] == 2


def test_a_waiting_request_that_is_finished_is_forgotten() -> None:
    scheduler = make_scheduler(seqs=1)
    first, second = make_request(2, 5), make_request(2, 5, name="1")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.finish(second)
    scheduler.finish(second)
    assert not scheduler.waiting
    assert scheduler.slot_of(first) is not None

"""The scheduler alone: budget, order, admission, preemption, progress."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.blocks import BlockAllocator
from peagle.engine.request import Request, Status
from peagle.engine.scheduler import Scheduled, Scheduler
from peagle.sampling_params import SamplingParams

MAX_MODEL_LEN = 30


def make_request(name: str, num_prompt: int, max_tokens: int, k: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[0] * num_prompt,
        params=SamplingParams(),
        seed=0,
        max_tokens=min(max_tokens, MAX_MODEL_LEN - num_prompt),
        num_speculative_tokens=k,
        stop_token_ids=frozenset(),
    )


def make_scheduler(
    num_blocks: int = 30, block_size: int = 1, seqs: int = 4, budget: int = 16, **options: int
) -> Scheduler:
    allocator = BlockAllocator(num_blocks, block_size)
    return Scheduler(allocator, seqs, budget, MAX_MODEL_LEN, options.get("max_draft_position"))


def apply(scheduler: Scheduler, schedule: list[Scheduled], rng: random.Random) -> None:
    """Plays the engine: a random number of drafts is accepted."""
    for scheduled in schedule:
        request = scheduled.request
        accepted = rng.randint(0, scheduled.num_draft_tokens)
        samples = scheduled.samples
        request.num_computed += scheduled.num_tokens + (accepted if samples else 0)
        if not samples:
            continue
        for _ in range(accepted + 1):
            request.token_ids.append(1)
            if request.num_outputs == request.max_tokens:
                request.finish("length")
                scheduler.finish(request)
                break


@settings(max_examples=150)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 29), st.integers(1, 20), st.integers(0, 8)), min_size=1, max_size=9
    ),
    block_size=st.integers(1, 4),
    spare=st.integers(0, 12),
    seqs=st.integers(1, 5),
    budget=st.integers(1, 24),  # even fewer rows than sequences
    seed=st.integers(0, 10),
)
def test_every_request_finishes_within_budget_and_blocks(
    shapes: list[tuple[int, int, int]],
    block_size: int,
    spare: int,
    seqs: int,
    budget: int,
    seed: int,
) -> None:
    num_blocks = -(-MAX_MODEL_LEN // block_size) + spare
    scheduler = make_scheduler(num_blocks, block_size, seqs, budget)
    rng = random.Random(seed)
    requests = [make_request(str(n), *shape) for n, shape in enumerate(shapes)]
    arriving = list(requests)
    first_scheduled: list[Request] = []
    for _ in range(3000):
        if arriving and rng.random() < 0.5:
            scheduler.add(arriving.pop(0))
        schedule = scheduler.schedule()
        check_schedule(scheduler, schedule)
        first_scheduled += [s.request for s in schedule if s.request not in first_scheduled]
        if not schedule and not arriving:
            assert not scheduler.running
            assert not scheduler.waiting
            break
        apply(scheduler, schedule, rng)
    assert all(r.finish_reason == "length" for r in requests)
    assert all(r.num_outputs == r.max_tokens for r in requests)
    assert first_scheduled == requests  # first come, first served
    assert scheduler.allocator.num_free == num_blocks


def check_schedule(scheduler: Scheduler, schedule: list[Scheduled]) -> None:
    allocator = scheduler.allocator
    assert (
        sum(s.num_tokens + s.num_draft_tokens for s in schedule) <= scheduler.max_num_batched_tokens
    )
    assert len(scheduler.running) <= scheduler.max_num_seqs
    names = [s.request.request_id for s in schedule]
    assert len(set(names)) == len(names)
    allocator.check([r.table for r in scheduler.running if r.table is not None])
    oldest = scheduler.running[:1]
    assert not oldest or schedule, "a step without work while someone runs"
    for scheduled in schedule:
        request = scheduled.request
        assert request.status is Status.RUNNING
        assert request.table is not None
        last = request.num_computed + scheduled.num_tokens + scheduled.num_draft_tokens
        assert request.table.capacity >= last
        assert last <= MAX_MODEL_LEN - 1 or scheduled.num_draft_tokens == 0
        assert 1 <= scheduled.num_tokens <= request.num_uncomputed
        assert scheduled.num_draft_tokens <= request.num_speculative_tokens
        assert scheduled.num_draft_tokens == 0 or scheduled.samples
        # With all drafts and the bonus token a request ends at its max_tokens, not behind.
        ahead = request.num_outputs + scheduled.num_draft_tokens + 1
        assert ahead <= request.max_tokens or scheduled.num_draft_tokens == 0
    assert all(r.table is None and r.num_computed == 0 for r in scheduler.waiting)
    order = [int(r.request_id) for r in (*scheduler.running, *scheduler.waiting)]
    assert order == sorted(order)


def decoding(scheduler: Scheduler, *shapes: tuple[int, int, int]) -> list[Request]:
    """Requests whose prompts have been computed."""
    requests = [make_request(str(n), *shape) for n, shape in enumerate(shapes)]
    for request in requests:
        scheduler.add(request)
    apply(scheduler, scheduler.schedule(), random.Random(0))
    assert all(r.num_uncomputed == 1 for r in requests)
    return requests


def test_every_decoding_request_gets_its_row_before_any_gets_drafts() -> None:
    scheduler = make_scheduler(num_blocks=60, budget=6)
    decoding(scheduler, (2, 20, 8), (2, 20, 8), (2, 20, 8))
    schedule = scheduler.schedule()
    assert [(s.num_tokens, s.num_draft_tokens) for s in schedule] == [(1, 3), (1, 0), (1, 0)]


def test_drafts_are_given_up_before_anyone_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=32)
    decoding(scheduler, (7, 20, 8), (7, 20, 8))
    schedule = scheduler.schedule()  # 16 blocks with drafts, and 8 without
    assert [(s.num_tokens, s.num_draft_tokens) for s in schedule] == [(1, 8), (1, 0)]


class _Rejecting(random.Random):
    def randint(self, a: int, b: int) -> int:
        return a


def test_the_youngest_is_preempted_and_waits_in_front_of_later_ones() -> None:
    scheduler = make_scheduler(num_blocks=30, budget=32)
    first, second, third = decoding(scheduler, (5, 20, 0), (5, 20, 0), (15, 10, 0))
    later = make_request("3", 15, 3, 0)
    scheduler.add(later)
    while third.num_preemptions == 0:
        apply(scheduler, scheduler.schedule(), random.Random(0))
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)
    assert list(scheduler.waiting) == [third, later]
    assert third.num_computed == 0
    assert third.table is None


def test_no_drafts_where_the_head_has_no_positions() -> None:
    scheduler = make_scheduler(num_blocks=60, max_draft_position=8)
    (request,) = decoding(scheduler, (4, 20, 8))
    # Draft i is predicted at position num_tokens - 2 + i, counted from 0, which must be below 8.
    while True:
        (scheduled,) = scheduler.schedule()
        assert scheduled.num_draft_tokens == max(8 - request.num_tokens + 2, 0)
        if request.num_tokens > 11:
            break
        apply(scheduler, [scheduled], _Rejecting())


def test_prefill_goes_on_in_chunks_while_others_decode() -> None:
    scheduler = make_scheduler(num_blocks=90, budget=6)
    (short,) = decoding(scheduler, (2, 20, 2))
    long = make_request("1", 17, 5, 2)
    scheduler.add(long)
    chunks = []
    while long.num_outputs == 0:
        schedule = scheduler.schedule()
        chunks += [s.num_tokens for s in schedule if s.request is long]
        assert schedule[0].request is short
        apply(scheduler, schedule, _Rejecting())
    assert sum(chunks) == 17
    assert chunks[:5] == [3, 3, 3, 3, 3]


def test_an_admitted_request_holds_blocks_for_its_whole_prompt() -> None:
    """So prefill, once begun, never has to preempt anyone."""
    scheduler = make_scheduler(num_blocks=30, budget=6)
    request = make_request("0", 17, 5, 2)
    scheduler.add(request)
    (scheduled,) = scheduler.schedule()
    assert scheduled.num_tokens == 6
    assert request.table is not None
    assert request.table.capacity == 17

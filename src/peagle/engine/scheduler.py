"""Who computes which rows in this step: admission, prompt chunks, drafts, preemption.

First come, first served. A step holds at most `max_num_batched_tokens` rows, those aside that pad a
graph's shape, which drafts may use where requests share rows. Decoding requests go first, one row
each before any drafts; prompts take what is left, in chunks. When blocks run out, drafts are given
up first, then the youngest running request is preempted: its blocks are freed and it is recomputed
later.

The last token of a prompt is a decode row like any newest token: it stands in the same step as the
rest of the prompt, or in the next one. So prompt rows never sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from peagle.engine.adjust import needs_adjustment
from peagle.engine.blocks import BlockAllocator
from peagle.engine.clock import Clock, Shares
from peagle.engine.host_batch import NEVER, Column, HostBatch
from peagle.engine.prefix_cache import Key, PrefixCacheStats, extend_keys
from peagle.engine.request import Request, Status
from peagle.engine.rests import Rests
from peagle.engine.sampler import SAMPLINGS, sampling_of
from peagle.speculation.budget import DraftBudget, DraftChoice
from peagle.speculation.draft_limit import num_drafted_rows

# Blocks taken ahead while there are plenty, so that the host does it less often: most answers get
# all of theirs when they are admitted, and the device is told once.
BLOCKS_AHEAD = 16


@dataclass(eq=False)
class Slot:
    """A running request. What changes with every step is in the HostBatch."""

    request: Request
    index: int
    serial: int
    num_known: int  # tokens known when it was admitted: the prompt, or more after preemption
    num_prefilled: int = 0  # of all but the last of these, how many were scheduled or cached
    num_launched: int = 0  # of these, how many rows the device has, or will have first
    is_cacheable: bool = True  # False: the drafter leaves rows out from now on
    closed: bool = False  # ended or preempted: reports still in flight are not for it
    began: Shares | None = None  # the clock when it was admitted

    @property
    def num_prompt_rows(self) -> int:
        """Rows that are left before the newest token's."""
        return self.num_known - 1 - self.num_prefilled


class Chunk(NamedTuple):
    """Known tokens first .. first + num_rows - 1 of a slot, none of them its newest."""

    slot: Slot
    first: int
    num_rows: int


class Schedule(NamedTuple):
    """The rows of one step."""

    slots: Column  # that decode
    caps: Column  # drafts that each may verify
    chunks: list[Chunk]
    opened: list[Slot]  # those that the device does not know yet
    grown: list[Slot]  # those with blocks that the device does not know yet
    drafts: DraftChoice | None = None  # None: as many as requests ask for

    def __bool__(self) -> bool:
        return bool(len(self.slots) or self.chunks)


class Scheduler:
    def __init__(
        self,
        allocator: BlockAllocator,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_drafts: int,
        eos_token_ids: frozenset[int],
        clock: Clock,
        budget: DraftBudget | None = None,
        *,
        prefix_caching: bool = False,
        max_draft_tokens: int | None = None,  # of a drafter that has a cache
    ) -> None:
        self.allocator, self.clock, self.budget = allocator, clock, budget
        self.prefix_caching, self.max_draft_tokens = prefix_caching, max_draft_tokens
        self.prefix_cache_stats = PrefixCacheStats()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.batch = HostBatch(max_num_seqs, max_drafts)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Slot] = {}  # by index, in order of admission
        self._prompting: list[Slot] = []  # those whose newest token has not been launched
        self._eos_token_ids = eos_token_ids
        self._num_admitted = self._num_preempted = 0
        self._rests = None
        if budget is not None and budget.rows_are_exact and max_draft_tokens is not None:
            self._rests = Rests(budget)
        self._free = list(range(max_num_seqs))[::-1]

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        num_preempted = self._num_preempted
        grown = self._pass_windows() if self.allocator.has_windows else []
        grown += self._make_room()
        if self._rests is not None:
            self._wake(self._rests)
        slots = self.batch.ready().nonzero()[0]
        caps, drafts = self._caps(slots)
        num_drafts = int(caps.sum())
        if drafts is not None and drafts.mean_drafts is not None:
            num_drafts = min(num_drafts, drafts.mean_drafts * len(slots))
        budget = self.max_num_batched_tokens - len(slots) - num_drafts
        opened = []
        if self._num_preempted == num_preempted:  # else the victim would come straight back
            opened = self._admit(budget)
        chunks, joined = self._schedule_prompts(budget)
        if joined:
            slots = np.concatenate((slots, joined))
            caps = np.concatenate((caps, np.zeros(len(joined), dtype=np.int64)))
        grown = [s for s in dict.fromkeys(grown) if not s.closed] + opened
        return Schedule(slots, caps, chunks, opened, grown, drafts)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def slot_of(self, request: Request) -> Slot | None:
        return next((s for s in self.running.values() if s.request is request), None)

    def finish(self, request: Request) -> None:
        """Frees the request wherever it stands. Its `finish` was called."""
        slot = self.slot_of(request)
        if slot is not None:
            self._close(slot)
            if self._rests is not None:
                self._rests.ended(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _caps(self, slots: Column) -> tuple[Column, DraftChoice | None]:
        """Drafts that pay and that the step has rows for; the oldest requests first. While prompts
        wait, drafts leave half of the rows to them."""
        caps, drafts = self.batch.num_rows[slots] - 1, None
        left = self.max_num_batched_tokens - len(slots)
        has_prompts = bool(self._prompting or (self.waiting and self._free))
        if has_prompts:
            left //= 2
        if self.budget is not None:
            drafts = self.budget.choose(slots, caps, may_explore=not has_prompts)
            drafts = self.budget.fitted(drafts, left)
            caps = drafts.caps.copy()
        if caps.sum() > left and (drafts is None or drafts.mean_drafts is None):
            order = np.argsort(self.batch.serials[slots])
            before = np.cumsum(caps[order]) - caps[order]
            caps[order] = np.clip(left - before, 0, caps[order])
        return caps, drafts

    def _schedule_prompts(self, budget: int) -> tuple[list[Chunk], list[int]]:
        """-> the chunks that fit, and the slots whose newest token comes with them."""
        chunks: list[Chunk] = []
        joined: list[int] = []
        for slot in self._prompting:
            count = min(slot.num_prompt_rows, budget)
            if count > 0:
                chunks.append(Chunk(slot, slot.num_prefilled, count))
                slot.num_prefilled += count
                budget -= count
            if slot.num_prompt_rows == 0 and budget > 0:
                joined.append(slot.index)
                self.batch.decodes[slot.index] = 1
                budget -= 1
        decoding = set(joined)
        self._prompting = [s for s in self._prompting if s.index not in decoding]
        return chunks, joined

    def _admit(self, budget: int) -> list[Slot]:
        """Lets waiting requests in while there are rows, a slot, and blocks for all their known
        tokens and the first step's."""
        admitted: list[Slot] = []
        budget -= sum(s.num_prompt_rows + 1 for s in self._prompting)
        while self.waiting and self._free and budget > 0:
            request = self.waiting[0]
            limit = len(request.prompt_token_ids) + request.max_tokens
            most = limit + request.cache_slack
            if self._rests is not None:
                self._let_rest(request, self._rests.starts(request, self._load))
            table = self.allocator.open_table(most, self._keys(request))
            num_cached = table.capacity
            has_room = self.allocator.grow(table, self._first_tokens(request, most))
            if not has_room or self._is_computed_by_another(request, num_cached):
                self.allocator.close_table(table)
                break
            self.waiting.popleft()
            request.table, request.status = table, Status.RUNNING
            admitted.append(self._open(request, limit, num_cached))
            budget -= request.num_tokens - num_cached
        for slot in admitted:
            self._grow(slot, 0)
        return admitted

    def _let_rest(self, request: Request, rests: bool) -> None:
        if rests != request.rests:
            request.rests = rests
            request.block_keys.clear()  # others, where the drafter's rows are there as well

    def _wake(self, rests: Rests) -> None:
        """Sends a request back, to come again with drafts."""
        running = {slot.request: slot for slot in self.running.values() if slot.request.rests}
        woken = rests.woken(list(running), self._load)
        if woken is not None:
            self._preempt(running[woken])

    @property
    def _load(self) -> int:
        """Requests that will run."""
        return min(len(self.running) + len(self.waiting), self.max_num_seqs)

    @staticmethod
    def _first_tokens(request: Request, most: int) -> int:
        """Those that are known, and the first drafts': verified, or in the drafter's cache."""
        num_rows = max(request.max_drafts, request.num_draft_rows)
        return min(request.num_tokens + num_rows + 1, most)

    def _open(self, request: Request, limit: int, num_cached: int) -> Slot:
        self._num_admitted += 1
        slot = Slot(request, self._free.pop(), self._num_admitted, request.num_tokens)
        slot.num_prefilled = slot.num_launched = num_cached
        if not request.num_preemptions:
            request.num_cached_tokens = num_cached
            self.prefix_cache_stats.queries += request.num_tokens if self.prefix_caching else 0
            self.prefix_cache_stats.hits += num_cached
        slot.began = self.clock.shares
        batch, n = self.batch, slot.index
        assert request.table is not None
        batch.serials[n] = slot.serial
        batch.limits[n] = limit
        batch.max_capacity[n] = limit + request.cache_slack
        batch.capacity[n] = request.table.capacity
        batch.passes_next[n] = request.table.passes_next or NEVER
        batch.per_step[n] = request.draft_depth + 1
        batch.num_rows[n] = request.max_drafts + 1
        batch.draft_rows[n] = request.num_draft_rows
        batch.sampling[n] = SAMPLINGS.index(sampling_of([request.params]))
        batch.needs_host[n] = request.params.logprobs is not None or needs_adjustment(request)
        batch.ends_early[n] = not request.stop_token_ids <= self._eos_token_ids
        batch.num_computed[n] = slot.num_known - 1
        request.take_outcomes = partial(batch.take_outcomes, n)
        self.running[n] = slot
        self._prompting.append(slot)
        return slot

    def launched(self, chunks: Sequence[Chunk]) -> None:
        """These rows are computed before whatever is scheduled from now on."""
        for slot, first, num_rows in chunks:
            slot.num_launched = first + num_rows
            reach = self._drafter_reach(slot.request)
            if reach is not None and slot.num_launched >= reach:
                slot.is_cacheable = False
            self._remember(slot, slot.num_launched)

    def _remember(self, slot: Slot, num_rows: int) -> None:
        """Blocks that these rows fill are known from now on. What was sampled and not collected
        yet, or refused, is not among them."""
        if self.prefix_caching and slot.is_cacheable:
            assert slot.request.table is not None
            keys = self._keys(slot.request)[: num_rows // self.allocator.block_size]
            self.allocator.remember(slot.request.table, keys)

    def _num_final_rows(self, slot: Slot) -> int:
        """Rows of a slot that both caches have for good, as far as reports say. The device may
        have gone on behind a token that ended the request."""
        request, reach = slot.request, self._drafter_reach(slot.request)
        if slot.num_launched < slot.num_known - 1 or request.finish_reason == "error":
            return slot.num_launched
        if reach is None:
            return request.num_tokens - 1
        num_tokens, limit = (
            int(x[slot.index]) for x in (self.batch.num_computed, self.batch.limits)
        )
        drafted = num_drafted_rows(num_tokens + 1, request.draft_depth, limit, reach)
        return min(request.num_tokens - 1, drafted)

    def _keys(self, request: Request) -> list[Key]:
        if self.prefix_caching:
            extend_keys(
                request.block_keys,
                request.token_ids,
                self.allocator.block_size,
                is_drafted=self._drafter_reach(request) is not None,
            )
        return request.block_keys

    def _drafter_reach(self, request: Request) -> int | None:
        """`max_draft_tokens`; None where its blocks do not hold the drafter's rows."""
        return self.max_draft_tokens if request.draft_depth else None

    def _is_computed_by_another(self, request: Request, num_cached: int) -> bool:
        """Whether what the request lacks first is in a prompt that is not launched yet: then it
        waits for it."""
        block = num_cached // self.allocator.block_size
        key = request.block_keys[block : block + 1]
        return bool(key) and any(
            slot.is_cacheable and slot.request.block_keys[block : block + 1] == key
            for slot in self._prompting
        )

    def _pass_windows(self) -> list[Slot]:
        """Frees what no row to come can see; steps in flight count from the last report that was
        read. -> prompts that have got other blocks for it."""
        batch = self.batch
        for n in np.flatnonzero((batch.decodes > 0) & (batch.num_computed >= batch.passes_next)):
            self._pass_by(self.running[int(n)], int(batch.num_computed[n]))
        prompting = list(self._prompting)
        for slot in prompting:
            if not slot.closed:
                self._pass_by(slot, slot.num_launched)
            # It asks for no more than it let go of, but others may hold some of that, too.
            while not slot.closed and not self._grow_prompt(slot):
                self._preempt(next(reversed(self.running.values())))
        return prompting

    def _grow_prompt(self, slot: Slot) -> bool:
        table, most = slot.request.table, int(self.batch.max_capacity[slot.index])
        assert table is not None
        has_grown = self.allocator.grow(table, self._first_tokens(slot.request, most))
        self.batch.capacity[slot.index] = table.capacity
        return has_grown

    def _pass_by(self, slot: Slot, position: int) -> None:
        table = slot.request.table
        assert table is not None
        self.allocator.pass_by(table, position)
        self.batch.passes_next[slot.index] = table.passes_next or NEVER

    def _make_room(self) -> list[Slot]:
        """Blocks for one more step of all that decode, the oldest first; may preempt the youngest.
        -> those that have got some."""
        batch = self.batch
        (short,) = (batch.ready() & (batch.reach() > batch.capacity)).nonzero()
        slots = sorted((self.running[n] for n in short.tolist()), key=lambda s: s.serial)
        for slot in slots:
            self._make_room_for(slot)
        return slots

    def _make_room_for(self, slot: Slot) -> None:
        """With all drafts, or at least for the newest token, unless it is preempted itself."""
        own = slice(slot.index, slot.index + 1)
        with_drafts, without = int(self.batch.reach(own)[0]), int(self.batch.start(own)[0]) + 1
        if slot.closed or self._grow(slot, with_drafts):
            return
        while not slot.closed and not self._grow(slot, without):
            self._preempt(next(reversed(self.running.values())))

    def _grow(self, slot: Slot, num_tokens: int) -> bool:
        """Room for so many tokens and, if there is plenty, for some more. False: not even for
        these."""
        table, most = slot.request.table, int(self.batch.max_capacity[slot.index])
        assert table is not None
        needed = max(num_tokens, table.capacity)
        wishes = (needed + self._tokens_ahead(), needed)
        has_grown = any(self.allocator.grow(table, min(wish, most)) for wish in wishes)
        self.batch.capacity[slot.index] = table.capacity
        return has_grown

    def _tokens_ahead(self) -> int:
        """None while somebody waits for blocks. If all took as many, most free ones would be
        left."""
        if self.waiting and self._free:
            return 0
        share = self.allocator.num_free // (4 * len(self.running) * len(self.allocator.windows))
        return min(share, BLOCKS_AHEAD) * self.allocator.block_size

    def _preempt(self, slot: Slot) -> None:
        """Tokens in flight are lost and computed again: the same, or, by rejection, others of the
        same distribution, for nobody has read them."""
        self._close(slot)
        self._num_preempted += 1
        slot.request.preempt()
        self.waiting.appendleft(slot.request)

    def _close(self, slot: Slot) -> None:
        """Frees the slot and its blocks. What is in flight runs before whoever comes next."""
        assert not slot.closed
        self._remember(slot, self._num_final_rows(slot))
        request = slot.request
        stats = request.stats  # with the outcomes that the batch has
        request.take_outcomes = None
        if slot.began is not None:
            self.clock.shares.add_to(stats, since=slot.began)
        slot.closed = True
        del self.running[slot.index]
        if slot in self._prompting:
            self._prompting.remove(slot)
        self.batch.clear(slot.index)
        self._free.append(slot.index)
        if request.table is not None:
            self.allocator.close_table(request.table)
            request.table = None

"""Who computes how many tokens in this step: admission, chunked prefill, preemption.

First come, first served. A step holds at most `max_num_batched_tokens` rows. Decoding requests
go first, one row each before any drafts; prefill takes what is left, in chunks. When blocks run
out, drafts are given up first, then the youngest running request is preempted: its blocks are
freed and it is recomputed later.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from peagle.engine.blocks import BlockAllocator
from peagle.engine.request import Request, Status


class Scheduled(NamedTuple):
    request: Request
    num_tokens: int  # known tokens to compute
    num_draft_tokens: int  # drafts to verify behind them, at most

    @property
    def samples(self) -> bool:
        """True if the step reaches the newest token, so that a next one is sampled."""
        return self.num_tokens == self.request.num_uncomputed


class Scheduler:
    def __init__(
        self,
        allocator: BlockAllocator,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_draft_position: int | None,
    ) -> None:
        self.allocator = allocator
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_draft_position = max_draft_position
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._num_preempted = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        schedule: list[Scheduled] = []
        preempted_before = self._num_preempted
        decoding = [r for r in self.running if r.num_uncomputed == 1]
        budget = self.max_num_batched_tokens - len(decoding)
        for request in decoding:
            if request.status is Status.RUNNING:  # an older one may have preempted it
                drafts = min(self._draft_limit(request), budget)
                drafts = self._make_room(request, 1, drafts)
                if request.status is Status.RUNNING:
                    schedule.append(Scheduled(request, 1, drafts))
                    budget -= drafts
        budget = self._schedule_prefill(schedule, budget)
        if self._num_preempted == preempted_before:  # else the victim would come straight back
            self._admit(schedule, budget)
        # Only younger requests are preempted, and those are scheduled later.
        assert all(s.request.status is Status.RUNNING for s in schedule)
        return schedule

    def finish(self, request: Request) -> None:
        """Frees the request wherever it stands. Its `finish` was called."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def _schedule_prefill(self, schedule: list[Scheduled], budget: int) -> int:
        for request in [r for r in self.running if r.num_uncomputed > 1]:
            chunk = min(request.num_uncomputed, budget)
            if chunk < 1 or request.status is not Status.RUNNING:
                continue
            self._make_room(request, chunk, 0)
            if request.status is Status.RUNNING:
                schedule.append(Scheduled(request, chunk, 0))
                budget -= chunk
        return budget

    def _admit(self, schedule: list[Scheduled], budget: int) -> None:
        """Lets waiting requests in while the whole of their known tokens fits, with one to go."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self.allocator.blocks_for(request.num_tokens + 1) > self.allocator.num_free:
                return
            self.waiting.popleft()
            expected = len(request.prompt_token_ids) + request.max_tokens
            request.table = self.allocator.open_table(min(expected, self.max_model_len))
            request.status = Status.RUNNING
            self.running.append(request)
            chunk = min(request.num_uncomputed, budget)
            self.allocator.grow(request.table, request.num_tokens)
            schedule.append(Scheduled(request, chunk, 0))
            budget -= chunk

    def _make_room(self, request: Request, num_tokens: int, num_drafts: int) -> int:
        """Grows the request's table; -> how many drafts fit. May preempt, even the request."""
        assert request.table is not None
        needed = request.num_computed + num_tokens
        if self.allocator.grow(request.table, needed + num_drafts):
            return num_drafts
        while not self.allocator.grow(request.table, needed):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                break
        return 0

    def _draft_limit(self, request: Request) -> int:
        """Drafts beyond the request's end or the head's positions are wasted."""
        until_end = request.max_tokens - request.num_outputs - 1  # max_tokens fits the context
        limit = min(request.num_speculative_tokens, until_end)
        if self.max_draft_position is not None:
            limit = min(limit, self.max_draft_position - request.num_tokens + 2)
        return max(limit, 0)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self._num_preempted += 1
        request.forget_computation()
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.table is not None:
            self.allocator.close_table(request.table)
            request.table = None

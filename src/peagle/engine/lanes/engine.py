"""LaneEngine: the engine whose steps run on the device without asking the host."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from peagle.config import EngineConfig
from peagle.engine.adjust import needs_adjustment
from peagle.engine.engine import Engine, NewTokens, Speculation
from peagle.engine.lanes.caches import lane_models
from peagle.engine.lanes.choosing import Sampling
from peagle.engine.lanes.clock import DeviceClock
from peagle.engine.lanes.graphs import Report, Steps
from peagle.engine.lanes.prompts import Beside, Prompts
from peagle.engine.lanes.seats import Seat, Seating
from peagle.engine.lanes.shapes import batch_size, sampling_of
from peagle.engine.lanes.steps import DecodeShape
from peagle.engine.lanes.uploads import open_lanes, write_blocks
from peagle.engine.request import Request
from peagle.engine.sampler import Committed
from peagle.kernels.plain.lanes import HEADER
from peagle.models.target import TargetModel


class InFlight(NamedTuple):
    """A launched step whose report has not been read: which seat each of its rows is for."""

    report: Report
    seats: Sequence[Seat]
    is_prefill: bool


class LaneEngine(Engine):
    """Requests that the lanes cannot serve (logprobs, logit adjustments) take the plain engine's
    step, over the same cache and blocks."""

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(target, config, eos_token_ids=eos_token_ids, speculation=speculation)
        self.clock = DeviceClock(self.stats)
        self.seating = Seating(self.allocator, config.max_num_seqs, self.clock)
        self.models = lane_models(self, config.max_num_seqs)
        self.steps = Steps(self.models)
        max_rows = config.max_num_batched_tokens
        self._prompts = Prompts(self.steps, self.seating, max_rows, self._by_rejection)
        self._in_flight: deque[InFlight] = deque()

    @torch.inference_mode()
    def step(self) -> list[NewTokens]:
        """Launches the next steps, then reads what the ones before them gave."""
        num_earlier = len(self._in_flight)
        self._note_joined(self._prompts.join_in_time())
        news = super().step() if self.scheduler.running or self.scheduler.waiting else []
        open_lanes(self.models.state, self._admit())
        self._note_joined(self._prompts.launch())
        self._launch_decode()
        launched = len(self._in_flight) > num_earlier
        for _ in range(num_earlier if launched else len(self._in_flight)):
            news += self._read_next()
        if not self.has_unfinished:
            self.clock.pause()
            self.allocator.check([])
        return news

    def _note_joined(self, prompts: Beside | None) -> None:
        """Their reports are read before those of the decode steps that they take part in."""
        if prompts is not None:
            self._in_flight.append(InFlight(prompts.report, prompts.ended, True))

    def _read_next(self) -> list[NewTokens]:
        """Waits for the oldest step in flight, if it must, and commits what it gave."""
        step = self._in_flight.popleft()
        rows = step.report.rows()
        return self._read_prefill(step, rows) if step.is_prefill else self._read(step, rows)

    def splits_for(self, batch: int, context: int) -> int:
        """Parts into which attention divides the keys of a batch; a few sizes, for few graphs."""
        if self.models.device.type != "cuda":
            return 1
        from peagle.kernels.gpu.tiles import choose_splits

        longest = 1 << (context - 1).bit_length()
        num_processors = torch.cuda.get_device_properties(self.models.device).multi_processor_count
        kv_heads = self.target.config.num_key_value_heads
        return choose_splits(batch, kv_heads, longest, num_processors)

    @property
    def num_graphs(self) -> int:
        return self.steps.num_made

    @property
    def has_unfinished(self) -> bool:
        return super().has_unfinished or bool(self.seating.waiting or self.seating.seats)

    def _admit(self) -> list[Seat]:
        """Nobody is seated while those for the plain step all wait for blocks: a stream of
        others would keep them waiting for good."""
        waits_for_blocks = self.scheduler.waiting and not self.scheduler.running
        return [] if waits_for_blocks else self.seating.admit()

    def _launch_decode(self) -> None:
        grown = self.seating.make_room_for_step()
        self._note_joined(self._prompts.join_if_it_must())
        seats = self.seating.ready()
        if not seats:
            return
        write_blocks(self.models.state, grown)
        # What is pending of a lane fits, too: one row more than its own drafts at the most.
        depth = max(s.request.num_speculative_tokens for s in seats)
        batch, sampling = batch_size(len(seats)), sampling_of(seats)
        splits = self.splits_for(batch, max(s.reach for s in seats))
        shape = DecodeShape(batch, depth, sampling, splits, self._by_rejection(sampling))
        report = self.steps.decode(shape, [s.lane for s in seats])
        for seat in seats:
            seat.in_flight += 1
        self._in_flight.append(InFlight(report, seats, False))

    def _read_prefill(self, step: InFlight, rows: list[list[int]]) -> list[NewTokens]:
        share = self.clock.count(step.report, len(step.seats))
        news = []
        for seat, (token, failed) in zip(step.seats, rows, strict=False):
            if seat.closed:
                continue
            seat.began = self.clock.shares.without(share)
            if failed:
                news.append(self._fail(seat.request))
            else:
                news.append(self._append(seat.request, Committed([token], 0, [])))
                seat.request.stats.observe(0, 0)
                self.stats.observe(0, 0)
        return news

    def _read(self, step: InFlight, rows: list[list[int]]) -> list[NewTokens]:
        """For each request and step the host has a few microseconds, or the device waits."""
        self.clock.advance(self.clock.count(step.report, len(step.seats)))
        news = []
        outcomes: Counter[tuple[int, int]] = Counter()  # few kinds, counted once each
        for seat, row in zip(step.seats, rows, strict=False):
            if seat.closed:
                continue
            seat.in_flight -= 1
            num_new, num_drafts, failed = row[:HEADER]
            if num_new:
                seat.num_computed += num_new
                new = self._extend(seat, row[HEADER : HEADER + num_new])
                # Drafts behind the token that ended the request were verified for nothing.
                outcome = num_drafts, min(num_new - 1, len(new.token_ids))
                seat.request.outcomes.append(outcome)
                outcomes[outcome] += 1
                news.append(new)
            elif failed:
                news.append(self._fail(seat.request))
        for outcome, times in outcomes.items():
            self.stats.observe(*outcome, times)
        return news

    def _extend(self, seat: Seat, tokens: list[int]) -> NewTokens:
        """`_append`, in few operations where none of the tokens ends the request."""
        request = seat.request
        # The newest token is not computed.
        if seat.num_computed + 1 < seat.limit and request.stop_token_ids.isdisjoint(tokens):
            request.token_ids += tokens
            self.stats.num_output_tokens += len(tokens)
            return NewTokens(request, tokens, [])
        return self._append(request, Committed(tokens, len(tokens) - 1, []))

    def _enqueue(self, request: Request) -> None:
        if self._fits_lanes(request):
            self.seating.waiting.append(request)
        else:
            super()._enqueue(request)

    def _release(self, request: Request) -> None:
        seat = self.seating.seat_of(request)
        if seat is not None:
            self.seating.close(seat)
        elif request in self.seating.waiting:
            self.seating.waiting.remove(request)
        else:
            super()._release(request)

    def _fits_lanes(self, request: Request) -> bool:
        wants_logprobs = request.params.logprobs is not None
        too_deep = request.num_speculative_tokens >= self.models.state.pending_tokens.shape[1]
        return not (wants_logprobs or too_deep or needs_adjustment(request))

    def _by_rejection(self, sampling: Sampling) -> bool:
        """Greedy requests alone take the quicker graph; their tokens are the same."""
        return self._verification == "rejection" and sampling != "greedy"

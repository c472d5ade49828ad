"""LaneEngine: the engine whose steps run on the device without asking the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.config import EngineConfig
from peagle.engine.adjust import needs_adjustment
from peagle.engine.engine import Engine, NewTokens, Speculation
from peagle.engine.lanes.caches import lane_models
from peagle.engine.lanes.choosing import Sampling
from peagle.engine.lanes.clock import DeviceClock
from peagle.engine.lanes.graphs import Report, Steps
from peagle.engine.lanes.prompts import Beside, Prompts
from peagle.engine.lanes.seats import Seat, Seating
from peagle.engine.lanes.shapes import SAMPLINGS, batch_size
from peagle.engine.lanes.steps import DecodeShape
from peagle.engine.lanes.table import Lanes
from peagle.engine.lanes.uploads import write_blocks
from peagle.engine.request import Request
from peagle.engine.sampler import Committed
from peagle.kernels.plain.lanes import HEADER
from peagle.models.target import TargetModel


class InFlight(NamedTuple):
    """A launched step whose report has not been read: which seat each of its rows is for."""

    report: Report
    seats: Sequence[Seat]
    lanes: Lanes | None = None  # of a decode step: those of its seats, and their numbers
    serials: Lanes | None = None


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
        self.models = lane_models(self, config.max_num_seqs)
        max_drafts = self.models.state.pending_tokens.shape[1] - 1
        self.seating = Seating(
            self.allocator, config.max_num_seqs, max_drafts, self.eos_token_ids, self.clock
        )
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
        self._admit()
        self._note_joined(self._prompts.launch())
        self._launch_decode()
        launched = len(self._in_flight) > num_earlier
        for _ in range(num_earlier if launched else len(self._in_flight)):
            news += self._read_next()
        if not self.has_unfinished:
            self._in_flight.clear()  # what still runs is nobody's
            self.clock.pause()
            self.allocator.check([])
        return news

    def _note_joined(self, prompts: Beside | None) -> None:
        """Their reports are read before those of the decode steps that they take part in."""
        if prompts is not None:
            self._in_flight.append(InFlight(prompts.report, prompts.ended))

    def _read_next(self) -> list[NewTokens]:
        """Waits for the oldest step in flight, if it must, and commits what it gave."""
        step = self._in_flight.popleft()
        rows = step.report.rows()
        return self._read_prefill(step, rows) if step.lanes is None else self._read(step, rows)

    def splits_for(self, batch: int, context: int) -> int:
        """Parts into which attention divides the keys of a batch; a few sizes, for few graphs."""
        if self.models.device.type != "cuda":
            return 1
        from peagle.kernels.gpu.tiles import choose_splits

        longest = 1 << (context - 1).bit_length()
        kv_heads = self.target.config.num_key_value_heads
        return choose_splits(batch, kv_heads, longest, self._num_processors)

    @cached_property
    def _num_processors(self) -> int:
        properties = torch.cuda.get_device_properties(self.models.device)
        return int(properties.multi_processor_count)

    @property
    def num_graphs(self) -> int:
        return self.steps.num_made

    @property
    def has_unfinished(self) -> bool:
        return super().has_unfinished or bool(self.seating.waiting or self.seating.seats)

    def _admit(self) -> None:
        """Nobody is seated while those for the plain step all wait for blocks: a stream of
        others would keep them waiting for good."""
        waits_for_blocks = self.scheduler.waiting and not self.scheduler.running
        if not waits_for_blocks:
            self.seating.admit()

    def _launch_decode(self) -> None:
        grown = self.seating.make_room_for_step()
        self._note_joined(self._prompts.join_if_it_must())
        lanes, table = self.seating.ready_lanes(), self.seating.table
        if not len(lanes):
            return
        write_blocks(self.models.state, grown)
        # What is pending of a lane fits, too: one row more than its own drafts at the most.
        depth = int(table.per_step[lanes].max()) - 1
        batch, sampling = batch_size(len(lanes)), SAMPLINGS[table.sampling[lanes].max()]
        splits = self.splits_for(batch, int(table.reach(lanes).max()))
        shape = DecodeShape(batch, depth, sampling, splits, self._by_rejection(sampling))
        report = self.steps.decode(shape, lanes.tolist())
        table.in_flight[lanes] += 1
        seats = [self.seating.seats[lane] for lane in lanes.tolist()]
        self._in_flight.append(InFlight(report, seats, lanes, table.serials[lanes]))

    def _read_prefill(self, step: InFlight, rows: NDArray[np.int64]) -> list[NewTokens]:
        share = self.clock.count(step.report, len(step.seats))
        news = []
        for seat, (token, failed) in zip(step.seats, rows.tolist(), strict=False):
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

    def _read(self, step: InFlight, rows: NDArray[np.int64]) -> list[NewTokens]:
        """For each request and step the host has a few microseconds, or the device waits: lanes
        to which nothing special happens are counted as arrays."""
        self.clock.advance(self.clock.count(step.report, len(step.seats)))
        rows = rows[: len(step.seats)]
        lanes, (num_new, num_drafts), table = step.lanes, rows[:, :2].T, self.seating.table
        assert lanes is not None
        is_open = table.serials[lanes] == step.serials
        table.in_flight[lanes[is_open]] -= 1
        table.num_computed[lanes[is_open]] += num_new[is_open]
        goes_on = is_open & self._goes_on(lanes, rows)
        usual = num_drafts[goes_on], num_new[goes_on] - 1
        table.outcomes[lanes[goes_on], *usual] += 1
        self._count(*usual)
        news = []
        at_once, tokens, counts = goes_on.tolist(), rows[:, HEADER:].tolist(), num_new.tolist()
        for n in np.flatnonzero(is_open).tolist():
            said, seat = tokens[n][: counts[n]], step.seats[n]
            if at_once[n]:
                seat.request.token_ids += said
                news.append(NewTokens(seat.request, said, []))
            else:
                news += self._read_one(seat, rows[n].tolist())
        return news

    def _goes_on(self, lanes: Lanes, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where tokens came, none of them may end the request, and its limit is not reached."""
        table, num_new, tokens = self.seating.table, rows[:, 0], rows[:, HEADER:]
        is_new = np.arange(tokens.shape[1]) < num_new[:, None]
        ends = np.zeros_like(is_new)
        for token in self.eos_token_ids:  # one or two
            ends |= (tokens == token) & is_new
        # The newest token is not computed.
        is_short = table.num_computed[lanes] + 1 < table.limits[lanes]
        out: NDArray[np.bool_] = (
            (num_new > 0) & is_short & ~ends.any(1) & (table.ends_early[lanes] == 0)
        )
        return out

    def _count(self, drafted: Lanes, kept: Lanes) -> None:
        """Of lanes that go on."""
        self.stats.num_output_tokens += int(kept.sum()) + len(kept)
        size = self.seating.table.outcomes.shape[1]
        times = np.bincount(drafted * size + kept)
        for pair in np.flatnonzero(times).tolist():
            self.stats.observe(pair // size, pair % size, int(times[pair]))

    def _read_one(self, seat: Seat, row: list[int]) -> list[NewTokens]:
        """A lane that may have ended, or that said nothing."""
        num_new, num_drafts, failed = row[:HEADER]
        if not num_new:
            return [self._fail(seat.request)] if failed else []
        committed = Committed(row[HEADER : HEADER + num_new], num_new - 1, [])
        new = self._append(seat.request, committed)
        # Drafts behind the token that ended the request were verified for nothing.
        outcome = num_drafts, min(num_new - 1, len(new.token_ids))
        seat.request.stats.observe(*outcome)
        self.stats.observe(*outcome)
        return [new]

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

"""LaneEngine: the engine whose steps run on the device without asking the host."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from peagle.config import EngineConfig
from peagle.engine.adjust import needs_adjustment
from peagle.engine.engine import Engine, NewTokens, Speculation
from peagle.engine.lanes.caches import LaneDrafting, LaneModels, PagedModel
from peagle.engine.lanes.graphs import Mark, Report, Steps
from peagle.engine.lanes.prefill import next_chunks, prefill_inputs
from peagle.engine.lanes.seats import Seat, Seating
from peagle.engine.lanes.steps import PREFILL_ITEM, DecodeShape, PrefillShape, Sampling
from peagle.engine.lanes.uploads import open_lanes, write_blocks
from peagle.engine.request import Request
from peagle.engine.sampler import Committed
from peagle.kernels.lane_state import make_lane_state
from peagle.kernels.plain.lanes import HEADER
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import Drafter
from peagle.models.lane_drafters import lane_drafter
from peagle.models.target import TargetModel

# Batches are filled up to one of these sizes, so that few graphs serve all.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Lanes keep hidden states for so many drafts, even if the engine's own K is smaller.
MIN_LANE_DEPTH = 16


class InFlight(NamedTuple):
    """A launched step whose report has not been read: which seat each of its rows is for."""

    report: Report
    seats: Sequence[Seat]
    is_prefill: bool


class LaneEngine(Engine):
    """Requests that the lanes cannot serve (logprobs, logit adjustments, rejection sampling) take
    the plain engine's step, over the same cache and blocks."""

    def __init__(
        self,
        target: TargetModel,
        config: EngineConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(target, config, eos_token_ids=eos_token_ids, speculation=speculation)
        self.seating = Seating(self.allocator, config.max_num_seqs)
        self.models = _lane_models(self, config)
        self.steps = Steps(self.models)
        self._max_items = max(config.max_num_batched_tokens // PREFILL_ITEM, 1)
        self._in_flight: deque[InFlight] = deque()
        self._last_ended: Mark | None = None  # of the step read last, while requests are running

    @torch.inference_mode()
    def step(self) -> list[NewTokens]:
        """Launches the next steps, then reads what the ones before them gave."""
        news = super().step() if self.scheduler.running or self.scheduler.waiting else []
        num_earlier = len(self._in_flight)
        open_lanes(self.models.state, self._admit())
        self._launch_prefill()
        self._launch_decode()
        launched = len(self._in_flight) > num_earlier
        for _ in range(num_earlier if launched else len(self._in_flight)):
            news += self._read_next()
        if not self.has_unfinished:
            self._last_ended = None
            self.allocator.check([])
        return news

    def _read_next(self) -> list[NewTokens]:
        """Waits for the oldest step in flight, if it must, and commits what it gave."""
        step = self._in_flight.popleft()
        rows = step.report.rows()
        self._count_device_time(step)
        return self._read_prefill(step, rows) if step.is_prefill else self._read(step, rows)

    def _count_device_time(self, step: InFlight) -> None:
        """Draft and verification are one graph: their time is counted together. The rest is time
        in which the device had nothing to do. A request's times are its even share."""
        begun, ended = step.report.begun, step.report.ended
        busy = ended.since(begun)
        idle = 0.0 if self._last_ended is None else max(begun.since(self._last_ended), 0.0)
        self._last_ended = ended
        for stats in (self.stats, *(seat.request.stats for seat in step.seats)):
            share = 1 if stats is self.stats else len(step.seats)
            stats.verify_time += busy / share
            stats.other_time += idle / share

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
    def has_unfinished(self) -> bool:
        return super().has_unfinished or bool(self.seating.waiting or self.seating.seats)

    def _admit(self) -> list[Seat]:
        """Nobody is seated while those for the plain step all wait for blocks: a stream of
        others would keep them waiting for good."""
        waits_for_blocks = self.scheduler.waiting and not self.scheduler.running
        return [] if waits_for_blocks else self.seating.admit()

    def _launch_prefill(self) -> None:
        chunks = next_chunks(self.seating.seats, self._max_items)
        if not chunks:
            return
        write_blocks(self.models.state, [c.seat for c in chunks])
        num_items = _padded(sum(c.num_items for c in chunks))
        shape = PrefillShape(num_items, _sampling([c.seat for c in chunks if c.is_final]))
        inputs = prefill_inputs(chunks, num_items, self.models.state.dummy)
        report = self.steps.prefill(shape, inputs)
        for chunk in chunks:
            chunk.seat.num_prefilled += chunk.count
            if chunk.is_final:
                chunk.seat.num_computed = chunk.seat.length
        self._in_flight.append(InFlight(report, [c.seat for c in chunks if c.is_final], True))
        # Reports are in the order of chunks; those that end no prompt have nothing to say.
        finals = [c.is_final for c in chunks]
        assert all(finals[:-1]), "only the last chunk may leave a prompt unfinished"

    def _launch_decode(self) -> None:
        for seat in [s for s in self.seating.seats if s.may_go_on]:
            if not seat.closed:
                self.seating.make_room(seat)
        seats = [s for s in self.seating.seats if s.may_go_on]
        if not seats:
            return
        write_blocks(self.models.state, seats)
        # What is pending of a lane fits, too: one row more than its own drafts at the most.
        depth = max(s.request.num_speculative_tokens for s in seats)
        batch = _batch_size(len(seats))
        splits = self.splits_for(batch, max(s.reach for s in seats))
        shape = DecodeShape(batch, depth, _sampling(seats), splits)
        report = self.steps.decode(shape, [s.lane for s in seats])
        for seat in seats:
            seat.in_flight += 1
        self._in_flight.append(InFlight(report, seats, False))

    def _read_prefill(self, step: InFlight, rows: list[list[int]]) -> list[NewTokens]:
        news = []
        for seat, (token, failed) in zip(step.seats, rows, strict=False):
            if seat.closed:
                continue
            if failed:
                news.append(self._fail(seat.request))
            else:
                news.append(self._append(seat.request, Committed([token], 0, [])))
                seat.request.stats.observe(0, 0)
                self.stats.observe(0, 0)
        return news

    def _read(self, step: InFlight, rows: list[list[int]]) -> list[NewTokens]:
        news = []
        outcomes: Counter[tuple[int, int]] = Counter()  # few kinds, counted once each
        for seat, row in zip(step.seats, rows, strict=False):
            if seat.closed:
                continue
            num_new, num_drafts, failed = row[:HEADER]
            seat.in_flight -= 1
            seat.num_computed += num_new
            request = seat.request
            if num_new:
                tokens = row[HEADER : HEADER + num_new]
                new = self._append(request, Committed(tokens, num_new - 1, []))
                outcome = num_drafts, min(num_new - 1, len(new.token_ids))
                request.stats.observe(*outcome)
                outcomes[outcome] += 1
                news.append(new)
            elif failed:
                news.append(self._fail(request))
        for outcome, times in outcomes.items():
            self.stats.observe(*outcome, times)
        return news

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
        by_rejection = self._verification == "rejection" and not request.params.greedy
        wants_logprobs = request.params.logprobs is not None
        too_deep = request.num_speculative_tokens >= self.models.state.pending_tokens.shape[1]
        return not (by_rejection or wants_logprobs or too_deep or needs_adjustment(request))


def _lane_models(engine: LaneEngine, config: EngineConfig) -> LaneModels:
    target, speculation = engine.target, engine.speculation
    drafter = speculation.drafter if speculation else None
    weight = target.embed_tokens.weight
    block_size = engine.allocator.block_size
    drafting = None
    depth = width = 0
    if drafter is not None:
        drafting = _lane_drafting(drafter, engine, block_size)
        assert speculation is not None
        depth = min(drafter.max_speculative_tokens, MIN_LANE_DEPTH)
        depth = max(depth, speculation.num_speculative_tokens)
        width = len(drafter.tap_layers) * target.config.hidden_size
    max_blocks = engine.allocator.blocks_for(engine.max_model_len)
    state = make_lane_state(config.max_num_seqs, max_blocks, depth + 1, width, weight)
    model = PagedModel(
        engine.runner.target_cache, block_size, target.config.max_position_embeddings - 1
    )
    return LaneModels(target, model, drafting, state, step_ops(weight.device))


def _lane_drafting(drafter: Drafter, engine: LaneEngine, block_size: int) -> LaneDrafting:
    lanes, cache = lane_drafter(drafter), engine.runner.draft_cache
    assert lanes is not None
    assert cache is not None
    assert drafter.max_positions is not None
    return LaneDrafting(
        lanes,
        PagedModel(cache, block_size, drafter.max_positions - 1),
        drafter.tap_layers,
        drafter.max_positions + 1,
    )


def _sampling(seats: Sequence[Seat]) -> Sampling:
    """What a step must be able to do for these requests."""
    params = [s.request.params for s in seats if not s.request.params.greedy]
    if not params:
        return "greedy"
    filtered = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params)
    return "filtered" if filtered else "sampled"


def _batch_size(count: int) -> int:
    """The smallest of BATCH_SIZES that holds them; beyond, multiples of the largest."""
    largest = BATCH_SIZES[-1]
    if count > largest:
        return -(-count // largest) * largest
    return next(size for size in BATCH_SIZES if size >= count)


def _padded(num_items: int) -> int:
    """The next power of two."""
    return 1 << (num_items - 1).bit_length()

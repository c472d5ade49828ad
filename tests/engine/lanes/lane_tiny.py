"""Lane engines over tiny models, watched from inside, and drafts whose fate is known.

The oracle is twofold: `tiny.naive` for the tokens, the plain Engine for the counters.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.graphs import Report, Steps
from peagle.engine.lanes.seats import Seat
from peagle.engine.lanes.steps import DecodeShape, PrefillShape
from peagle.models.lane_drafters import LaneDraftBatch, LaneDrafter
from torch import Tensor

from peagle.config import EngineConfig, Verification
from peagle.engine.engine import Engine, Speculation
from peagle.engine.request import Request
from peagle.models.attention import Attention
from peagle.models.drafter import DraftBatch, Drafter, SequenceDraft
from peagle.models.output import OutputRows
from peagle.models.target import TargetModel

from .. import tiny
from ..tiny import Job

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "block_size": 4}


class WatchedSteps(Steps):
    """Asserts before each step that the device may write what it is about to write."""

    def __init__(self, engine: LaneEngine) -> None:
        super().__init__(engine.models)
        self.engine = engine
        self.lanes: list[int] = []  # of the decode step that runs
        self.decode_shapes: list[DecodeShape] = []
        self.prefill_shapes: list[PrefillShape] = []

    def decode(self, shape: DecodeShape, lanes: Sequence[int]) -> Report:
        self.lanes = list(lanes)
        self.decode_shapes.append(shape)
        for lane in lanes:
            self._check_room(seat_at(self.engine, lane))
        report = super().decode(shape, lanes)
        check_dummy(self.engine)
        return report

    def prefill(self, shape: PrefillShape, inputs: Tensor) -> Report:
        self.prefill_shapes.append(shape)
        report = super().prefill(shape, inputs)
        check_dummy(self.engine)
        return report

    def _check_room(self, seat: Seat) -> None:
        state, table = self.models.state, seat.request.table
        assert table is not None
        assert state.block_tables[seat.lane, : len(table.blocks)].tolist() == table.blocks
        computed, limit = int(state.num_computed[seat.lane]), int(state.limits[seat.lane])
        deepest = seat.request.num_speculative_tokens + 1
        known, in_flight = (
            at_lane(self.engine, "num_computed", seat),
            at_lane(self.engine, "in_flight", seat),
        )
        assert known <= computed <= known + in_flight * deepest
        if computed + 1 < limit:  # else it writes nothing
            assert min(computed + deepest, limit - 1) <= table.capacity


def seat_at(engine: LaneEngine, lane: int) -> Seat:
    return engine.seating.seats[lane]


def at_lane(engine: LaneEngine, column: str, seat: Seat) -> int:
    return int(getattr(engine.seating.table, column)[seat.lane])


def check_dummy(engine: LaneEngine) -> None:
    state = engine.models.state
    assert int(state.limits[state.dummy]) == 0
    assert int(state.num_computed[state.dummy]) == 0
    assert int(state.draft_starts[state.dummy]) == 0  # a position: kernels look it up


def lane_engine(
    target: TargetModel,
    drafter: Drafter | None = None,
    k: int = 4,
    verification: Verification = "coupled",
    eos: Sequence[int] = (),
    **options: Any,
) -> LaneEngine:
    speculation = None if drafter is None else Speculation(drafter, k, verification)
    config = EngineConfig(**OPTIONS | options)
    engine = LaneEngine(target, config, eos_token_ids=eos, speculation=speculation)
    engine.steps = engine._prompts.steps = WatchedSteps(engine)
    return engine


def lane_drafts(engine: LaneEngine) -> WatchedSteps:
    assert isinstance(engine.steps, WatchedSteps)
    return engine.steps


class Script:
    """Knows whole answers. How many drafts are right changes from position to position."""

    def __init__(self, answers: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.answers = [list(a) for a in answers]
        self.seed = seed

    def drafts(self, prompt: Sequence[int], num_tokens: int, k: int) -> list[int]:
        """`prompt` may be the prompt or any longer part of the answer."""
        answer = next(a for a in self.answers if a[: len(prompt)] == list(prompt))
        right = random.Random(f"{self.seed} {num_tokens} {len(answer)}").choice((0, 1, 2, 4, 9))
        known = (answer[num_tokens:] + [0] * k)[:k]
        return [t if d < right else (t + 1) % tiny.VOCAB for d, t in enumerate(known)]


class ScriptedHead:
    """For the plain engine: runs a head, so that its cache is used, but drafts by the script."""

    method = "scripted head"

    def __init__(self, head: Drafter, script: Script) -> None:
        self.head, self.script = head, script
        self.tap_layers = head.tap_layers
        self.cache_layout = head.cache_layout
        self.max_positions = head.max_positions
        self.max_speculative_tokens = head.max_speculative_tokens

    def propose(self, batch: DraftBatch) -> list[SequenceDraft]:
        self.head.propose(batch)
        return [
            SequenceDraft(self.script.drafts(s.history, len(s.history), s.num_draft_tokens))
            for s in batch.sequences
        ]


class ScriptedLanes:
    """The same for lanes."""

    def __init__(self, inner: LaneDrafter, script: Script, engine: LaneEngine) -> None:
        self.inner, self.script, self.engine = inner, script, engine

    def propose(self, batch: LaneDraftBatch) -> Tensor:
        drafts = self.inner.propose(batch)
        for row, lane in enumerate(lane_drafts(self.engine).lanes):
            prompt = seat_at(self.engine, lane).request.prompt_token_ids
            num_tokens = int(self.engine.models.state.num_computed[lane]) + 1
            scripted = self.script.drafts(prompt, num_tokens, batch.depth)
            drafts[row] = torch.tensor(scripted)
        return drafts

    def feed(
        self, token_ids: Tensor, taps: Tensor, positions: Tensor, attention: Attention
    ) -> None:
        self.inner.feed(token_ids, taps, positions, attention)


def scripted_engine(
    target: TargetModel, head: Drafter, script: Script, k: int = 4, **options: Any
) -> LaneEngine:
    engine = lane_engine(target, head, k, **options)
    drafting = engine.models.drafting
    assert drafting is not None
    lanes = ScriptedLanes(drafting.drafter, script, engine)
    drafting = dataclasses.replace(drafting, drafter=lanes)
    engine.models = dataclasses.replace(engine.models, drafting=drafting)
    engine.steps = engine._prompts.steps = WatchedSteps(engine)
    return engine


class _GivenLogits:
    """The output layer of rows that are logits already."""

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def output_product(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.eye(hidden.shape[1], dtype=hidden.dtype)


def given(logits: Tensor) -> OutputRows:
    return OutputRows(logits, _GivenLogits())


def known(target: TargetModel, jobs: Sequence[Job]) -> list[list[int]]:
    return [j.prompt + tiny.naive(target, j) for j in jobs]


def counters(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Everything that is counted, but no times."""
    return [
        {k: v for k, v in dataclasses.asdict(r.stats).items() if not k.endswith("_time")}
        for r in requests
    ]


def endings(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [(r.finish_reason, r.stop_reason, r.error) for r in requests]


def check_same(lanes: Engine, plain: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Runs the jobs on both: same tokens, same endings, same counters."""
    ours, theirs = tiny.run(lanes, jobs), tiny.run(plain, jobs)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    assert endings(ours) == endings(theirs)
    assert counters(ours) == counters(theirs)
    return ours


def check_naive(target: TargetModel, requests: Sequence[Request], jobs: Sequence[Job]) -> None:
    assert tiny.answers_of(requests) == [tiny.naive(target, j) for j in jobs]


def idle(engine: LaneEngine) -> bool:
    return (
        not engine.has_unfinished
        and engine.allocator.num_free == engine.allocator.num_blocks
        and len(engine.seating._free_lanes) == engine.models.state.dummy
    )

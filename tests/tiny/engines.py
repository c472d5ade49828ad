"""Engines over tiny models whose every step is watched, and what their requests ended with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from peagle.config import EngineConfig, Verification
from peagle.engine.engine import Engine, Speculation
from peagle.engine.host_sampling import HostSampling
from peagle.engine.layer_groups import slot_bytes
from peagle.engine.request import Request
from peagle.engine.runner import Report, Runner
from peagle.engine.scheduler import Chunk, Slot
from peagle.engine.step import StepShape
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

from .drafters import ScriptedHead
from .jobs import Job, grammar_of

# Exact: rows and collection as on a CPU. Static: padded shapes, collected one step late, as on a
# GPU.
both_forms = pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])


def make_engine(
    target: TargetModel,
    drafter: Drafter | None = None,
    k: int = 4,
    verification: Verification = "coupled",
    eos: Sequence[int] = (),
    *,
    static: bool = False,
    nodes: int | None = None,
    auto: bool = False,
    **options: Any,
) -> Engine:
    """`static`: padded shapes and collection one step late, as under CUDA graphs. Every step is
    watched: see WatchedRunner."""
    speculation = None
    if drafter is not None:
        speculation = Speculation(drafter, k, verification, nodes, is_auto=auto)
    config = EngineConfig(**{"max_num_seqs": 8, "block_size": 4} | options)
    engine = Engine(
        target,
        config,
        eos_token_ids=eos,
        speculation=speculation,
        static_shapes=static,
        async_scheduling=static,
    )
    engine.runner.__class__ = WatchedRunner
    watched(engine).engine, watched(engine).shapes = engine, []
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engine
    return engine


class WatchedRunner(Runner):
    """Keeps the shapes, and asserts of each step that its rows have room, that the host's idea of
    the device is right, and that the padding slot never advances."""

    engine: Engine
    shapes: list[StepShape]

    def run(
        self,
        shape: StepShape,
        slots: NDArray[np.int64],
        caps: NDArray[np.int64],
        chunks: Sequence[Chunk],
        host: HostSampling | None = None,
    ) -> Report:
        self.shapes.append(shape)
        for index in slots.tolist():
            self._check_slot(self.engine.scheduler.running[index])
        report = super().run(shape, slots, caps, chunks, host)
        state = self.models.state
        assert state.numbers[1:4, state.padding].tolist() == [0, 0, 0]  # computed, limit, prompt
        assert int(state.num_drafts[state.padding]) == 0
        computed, limits = state.num_computed[slots], state.limits[slots]
        assert bool(((computed < limits) | (limits == 0)).all())  # 0: it failed
        return report

    def _check_slot(self, slot: Slot) -> None:
        state, batch, table = self.models.state, self.engine.scheduler.batch, slot.request.table
        assert table is not None
        n = slot.index
        for known, group in zip(state.block_tables[:, n], table.groups, strict=True):
            assert known[: len(group.blocks)].tolist() == group.blocks
        assert int(state.capacity[n]) == table.capacity == batch.capacity[n]
        computed, limit = int(state.num_computed[n]), int(state.limits[n])
        assert batch.num_computed[n] <= computed <= batch.start()[n]
        if computed + 1 < limit:  # else it writes nothing
            assert computed < table.capacity


def watched(engine: Engine) -> WatchedRunner:
    assert isinstance(engine.runner, WatchedRunner)
    return engine.runner


def run(engine: Engine, jobs: Sequence[Job], max_steps: int = 2000) -> list[Request]:
    """Steps until all are done; the blocks must be back afterwards."""
    requests: dict[int, Request] = {}
    step = 0
    while len(requests) < len(jobs) or engine.has_unfinished:
        assert step < max_steps, "the engine makes no progress"
        for n, job in enumerate(jobs):
            if job.joins <= step and n not in requests:
                requests[n] = engine.add_request(
                    str(n),
                    job.prompt,
                    job.params,
                    bad_word_ids=job.bad_word_ids,
                    grammar=grammar_of(job.params),
                )
        engine.step()
        engine.allocator.check([r.table for r in requests.values() if r.table is not None])
        engine.allocator.check_prefixes()
        step += 1
    assert is_idle(engine)
    return [requests[n] for n in range(len(jobs))]


def run_both(
    target: TargetModel,
    drafter: Drafter | None,
    k: int,
    jobs: Sequence[Job],
    verification: Verification = "coupled",
    **options: Any,
) -> tuple[list[Request], Engine]:
    """Runs the jobs in both forms: same tokens, endings and counters; -> the static one's."""
    engines = [
        make_engine(target, drafter, k, verification, static=static, **options)
        for static in (False, True)
    ]
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engines[0]
    exact = run(engines[0], jobs)
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engines[1]
    static = run(engines[1], jobs)
    assert answers_of(static) == answers_of(exact)
    assert endings(static) == endings(exact)
    assert counters(static) == counters(exact)
    return static, engines[1]


def answers_of(requests: Sequence[Request]) -> list[list[int]]:
    return [r.output_token_ids for r in requests]


def endings(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [(r.finish_reason, r.stop_reason, r.error) for r in requests]


def counters(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Everything that is counted, but no times."""
    return [
        {k: v for k, v in dataclasses.asdict(r.stats).items() if not k.endswith("_time")}
        for r in requests
    ]


def is_idle(engine: Engine) -> bool:
    """All blocks and slots are back."""
    scheduler = engine.scheduler
    return (
        not engine.has_unfinished
        and engine.allocator.num_free == engine.allocator.num_blocks
        and len(scheduler._free) == scheduler.max_num_seqs
        and not scheduler.running
        and not scheduler.batch.in_flight.any()
    )


def room_for(num_tokens: int, target: TargetModel, drafter: Drafter | None) -> dict[str, Any]:
    """Options of an engine whose caches hold that many tokens."""
    layouts = [target.cache_layout]
    if drafter is not None and drafter.cache_layout is not None:
        layouts.append(drafter.cache_layout)
    dtype = target.embed_tokens.weight.dtype
    return {"kv_cache_memory_bytes": num_tokens * sum(slot_bytes(x, dtype) for x in layouts)}

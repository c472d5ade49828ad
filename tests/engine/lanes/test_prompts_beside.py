"""Prompts are computed beside decode steps and join them after a fixed number of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from peagle.engine.lanes import prompts as module
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.graphs import Report
from peagle.engine.lanes.prefill import next_chunks
from peagle.engine.lanes.steps import PREFILL_ITEM, DecodeShape, PrefillShape
from torch import Tensor

from peagle.engine.kv_cache import slot_bytes
from peagle.engine.request import Request
from peagle.engine.runner import target_layout
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import Job
from .lane_tiny import WatchedSteps, check_naive, lane_engine

LONG = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class OrderedSteps(WatchedSteps):
    """Notes in which order steps are launched, and which lanes decode."""

    def __init__(self, engine: LaneEngine) -> None:
        super().__init__(engine)
        self.order: list[str | list[int]] = []

    def decode(self, shape: DecodeShape, lanes: Sequence[int]) -> Report:
        self.order.append(sorted(lanes))
        return super().decode(shape, lanes)

    def prefill(self, shape: PrefillShape, inputs: Tensor) -> Report:
        self.order.append("prefill")
        return super().prefill(shape, inputs)

    def join_prefill(self) -> None:
        self.order.append("join")
        super().join_prefill()


def beside_a_step(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """Prompt rows that take as long as a decode step, whatever its size."""
    monkeypatch.setattr(module, "PREFILL_START", 0)
    monkeypatch.setattr(module, "DECODE_START", num_rows)
    monkeypatch.setattr(module, "DECODE_ROW", 0)


def some_tokens(count: int) -> list[int]:
    return [1 + n % 37 for n in range(count)]


def engine_with_one_running(**options: int) -> tuple[LaneEngine, OrderedSteps]:
    engine = lane_engine(tiny.make_target(), max_num_seqs=4, **options)
    steps = OrderedSteps(engine)
    engine.steps = engine._prompts.steps = steps
    engine.add_request("old", tiny.prompts(1, seed=3)[0], LONG)
    engine.step()
    return engine, steps


def test_the_first_prompt_is_joined_at_once() -> None:
    _, steps = engine_with_one_running()
    assert steps.order == ["prefill", "join", [0]]


@pytest.mark.parametrize(("rows", "beside"), [(1, 1), (2, 2), (3, 3)])
def test_a_new_prompt_joins_after_as_many_steps_as_its_rows_take(
    rows: int, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_a_step(monkeypatch, PREFILL_ITEM)
    engine, steps = engine_with_one_running()
    engine.add_request("new", some_tokens(rows * PREFILL_ITEM - 1), LONG)
    steps.order.clear()
    for _ in range(beside + 1):
        engine.step()
    assert steps.order == ["prefill", *[[0]] * beside, "join", [0, 1]]


def test_steps_of_more_rows_take_longer_so_fewer_are_beside_a_prompt() -> None:
    counts = []
    for num_running in (2, 14):
        engine = lane_engine(tiny.make_target(), max_num_seqs=32)
        run_some(engine, num_running)
        engine.seating.table.per_step[:] = 40  # as with 39 drafts each
        engine.add_request("new", some_tokens(30), LONG)
        engine.seating.admit()
        chunks = next_chunks(engine.seating.prompting, max_items=4)
        counts.append(engine._prompts._steps_beside(chunks))
    assert counts == [2, 1]


def test_prompts_that_come_meanwhile_share_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    beside_a_step(monkeypatch, PREFILL_ITEM)
    engine, steps = engine_with_one_running()
    steps.order.clear()
    for name in ("a", "b", "c"):
        engine.add_request(name, [1, 2, 3], LONG)
        engine.step()
    assert steps.order == ["prefill", [0], "join", "prefill", [0, 1], "join", "prefill", [0, 1, 2]]


def test_a_few_prompts_wait_for_more_but_not_for_long() -> None:
    engine = lane_engine(tiny.make_target(), max_num_seqs=32)
    steps = OrderedSteps(engine)
    engine.steps = engine._prompts.steps = steps
    run_some(engine, 20)
    steps.order.clear()
    engine.add_request("one", [1, 2, 3], LONG)
    for _ in range(module.PATIENCE):
        engine.step()
    assert "prefill" not in steps.order
    engine.step()
    assert steps.order[-2] == "prefill"


def test_many_prompts_do_not_wait() -> None:
    engine = lane_engine(tiny.make_target(), max_num_seqs=32)
    steps = OrderedSteps(engine)
    engine.steps = engine._prompts.steps = steps
    run_some(engine, 20)
    steps.order.clear()
    for name in "abc":
        engine.add_request(name, [1, 2, 3], LONG)
    engine.step()
    assert steps.order[0] == "prefill"


def run_some(engine: LaneEngine, count: int) -> None:
    for n, prompt in enumerate(tiny.prompts(count, seed=3)):
        engine.add_request(str(n), prompt, LONG)
    engine.step()
    engine.step()
    assert engine.seating.num_decoding == count


def test_a_prompt_whose_request_ends_is_waited_for_before_its_blocks_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside_a_step(monkeypatch, 1)  # it would join much later
    engine, steps = engine_with_one_running()
    gone = engine.add_request("gone", some_tokens(39), LONG)
    engine.step()
    engine.abort(gone)
    next_one = engine.add_request("next", [4, 5, 6], LONG)
    steps.order.clear()
    engine.step()
    assert steps.order[:2] == ["join", "prefill"]
    while engine.has_unfinished:
        engine.step()
    assert next_one.output_token_ids == tiny.naive(engine.target, Job([4, 5, 6], LONG))


def test_a_prompt_that_is_sent_back_is_waited_for_before_the_step_that_takes_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside_a_step(monkeypatch, 1)
    bytes_per_block = tiny_block_bytes()
    engine, steps = engine_with_one_running(
        kv_cache_memory_bytes=bytes_per_block * 13, max_model_len=52
    )
    young = engine.add_request("young", some_tokens(23), LONG)
    steps.order.clear()
    while not young.num_preemptions:
        engine.step()
    assert steps.order[0] == "prefill"
    assert steps.order[-2:] == ["join", [0]]
    assert [0, 1] not in steps.order
    while engine.has_unfinished:
        engine.step()
    assert young.output_token_ids == tiny.naive(engine.target, Job(some_tokens(23), LONG), 52)


def tiny_block_bytes() -> int:
    target = tiny.make_target()
    return slot_bytes(target_layout(target), target.embed_tokens.weight.dtype) * 4


@pytest.mark.parametrize("rows_beside", [1, 16, 64])
def test_answers_do_not_depend_on_when_prompts_join(
    rows_beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside_a_step(monkeypatch, rows_beside)
    target = tiny.make_target()
    jobs = [Job(p, LONG) for p in tiny.prompts(7, seed=5)]
    check_naive(target, run(lane_engine(target, max_num_seqs=3), jobs), jobs)


def run(engine: LaneEngine, jobs: Sequence[Job]) -> list[Request]:
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    while engine.has_unfinished:
        engine.step()
    return requests

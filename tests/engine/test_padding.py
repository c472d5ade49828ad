"""Static shapes: batches and prompts are filled up with a slot that is nobody's."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.engine import runner as module
from peagle.engine.engine import Engine
from peagle.engine.runner import BATCH_SIZES, ITEM_COUNTS, ROWS_PER_ITEM, padded
from peagle.kernels.device_batch import HEADER
from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.progress import shown_by
from peagle.sampling_params import SamplingParams
from tests.tiny import engines, naive
from tests.tiny.displays import Remembering
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

METHODS = ["p-eagle", "eagle3"]
SAMPLED = SamplingParams(seed=3, top_k=9, max_tokens=12)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def head(method: str) -> Drafter:
    return head_drafter(SHALLOW.make_head(target(), method))


def decoding(method: str, count: int, verification: str = "coupled") -> Engine:
    """An engine in the middle of `count` answers."""
    engine = engines.make_engine(
        target(), head(method), 3, verification, max_num_seqs=9, static=True
    )
    for n, prompt in enumerate(prompts(count, seed=1)):
        engine.add_request(str(n), prompt, GREEDY if n % 2 else SAMPLED)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", range(1, 10))
def test_every_batch_size_is_served(method: str, count: int) -> None:
    jobs = [Job(p, GREEDY) for p in prompts(count, seed=1)]
    engine = engines.make_engine(target(), head(method), 3, max_num_seqs=9, static=True)
    naive.check(target(), engines.run(engine, jobs), jobs)
    shapes = engines.watched(engine).shapes
    assert {shape.batch for shape in shapes} <= set(BATCH_SIZES)
    assert {shape.num_items for shape in shapes} <= set(ITEM_COUNTS)
    assert {shape.rows_per_item for shape in shapes} == {ROWS_PER_ITEM}


def test_exact_shapes_are_those_of_the_rows() -> None:
    engine = engines.make_engine(target(), head("p-eagle"), 3, max_num_batched_tokens=20)
    engines.run(engine, [Job([1] * 30, GREEDY), Job([2] * 5, GREEDY), Job([3] * 7, GREEDY)])
    first, second, *_ = engines.watched(engine).shapes
    assert (first.batch, first.num_items, first.rows_per_item) == (0, 1, 20)  # 20 prompt rows
    # Its other 9, and the next two prompts'.
    assert (second.batch, second.num_items, second.rows_per_item) == (2, 3, 9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_state_of_slots_is_the_same_with_more_padding_beside_them(
    method: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = decoding(method, count)
    monkeypatch.setattr(module, "BATCH_SIZES", (16,))
    monkeypatch.setattr(module, "ITEM_COUNTS", (0, 24))
    more = decoding(method, count)
    for name in ("last_tokens", "num_computed", "num_drafts", "limits", "drafts"):
        ours, theirs = (getattr(e.runner.models.state, name)[:count] for e in (usual, more))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("method", METHODS)
def test_what_the_padding_slot_holds_changes_no_bit_of_the_others(
    method: str, verification: str
) -> None:
    pair = [decoding(method, 3, verification) for _ in range(2)]
    spoiled = pair[1].runner.models
    spoiled.state.last_tokens[spoiled.state.padding] = 5
    spoiled.state.block_tables[:, spoiled.state.padding] = 1
    spoiled.state.drafts[spoiled.state.padding] = 7
    assert spoiled.drafting is not None
    for cache_ in (spoiled.model.cache, spoiled.drafting.model.cache):
        cache_.keys[:, cache_.padding_slot] = 1e3
        cache_.values[:, cache_.padding_slot] = 1e3
    shape = engines.watched(pair[0]).shapes[-1]
    assert shape.batch == 4
    slots = np.array(list(pair[0].scheduler.running))
    with torch.inference_mode():
        reports = [e.runner.run(shape, slots, np.full(3, 3), []).rows().tolist() for e in pair]
    assert reports[0][:3] == reports[1][:3]
    assert reports[1][3][:HEADER] == [0, 0, 0]
    states = [e.runner.models.state for e in pair]
    assert torch.equal(states[0].numbers[:, slots], states[1].numbers[:, slots])
    assert torch.equal(states[0].drafts[slots], states[1].drafts[slots])


def test_beyond_the_largest_size_there_are_multiples_of_it() -> None:
    assert [padded(n, BATCH_SIZES) for n in (1, 3, 9, 256, 257, 600)] == [1, 4, 16, 256, 512, 768]
    assert [padded(n, ITEM_COUNTS) for n in (0, 1, 9, 128, 129)] == [0, 4, 12, 128, 256]


@given(st.integers(1, 5000))
def test_at_most_half_of_a_batch_is_padding(count: int) -> None:
    size = padded(count, BATCH_SIZES)
    assert count <= size < 2 * count or size == count == 1


@pytest.mark.parametrize("method", METHODS)
def test_warming_up_takes_every_shape_that_greedy_requests_meet(method: str) -> None:
    engine = engines.make_engine(target(), head(method), 3, max_num_seqs=9, static=True)
    engines.run(engine, [Job(p, GREEDY, joins=n) for n, p in enumerate(prompts(12, seed=1))])
    max_rows = engine.scheduler.max_num_batched_tokens
    common = engine.runner._common_shapes(engine._common_drafts, max_rows)
    met = {shape for shape in engines.watched(engine).shapes if shape.sampling == "greedy"}
    assert {shape.batch for shape in met} == {1, 2, 4, 8, 16}
    assert met <= set(common)
    assert len(set(common)) == len(common)
    assert max(shape.batch for shape in common) == 16


def test_without_graphs_there_is_nothing_to_warm_up() -> None:
    display = Remembering()
    with shown_by(display):
        engines.make_engine(target(), static=True).warm_up()
    assert display.ended == []

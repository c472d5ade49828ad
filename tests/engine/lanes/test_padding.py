"""Batches are filled up with a dummy lane: nobody sees it, and it never says anything."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from peagle.engine.lanes import shapes as module
from peagle.engine.lanes.engine import LaneEngine
from peagle.engine.lanes.shapes import BATCH_SIZES
from peagle.kernels.plain.lanes import HEADER

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import check_dummy, check_naive, lane_drafts, lane_engine

METHODS = ["p-eagle", "eagle3"]


@cache
def target() -> TargetModel:
    return tiny.make_target()


@cache
def head(method: str) -> Drafter:
    return tiny.head_drafter(tiny.make_head(target(), method))


def decoding(method: str, count: int) -> LaneEngine:
    """An engine in the middle of `count` answers, with nothing in flight that matters."""
    engine = lane_engine(target(), head(method), 3, max_num_seqs=9)
    for n, prompt in enumerate(tiny.prompts(count, seed=1)):
        engine.add_request(str(n), prompt, GREEDY)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", range(1, 10))
def test_every_batch_size_is_served(method: str, count: int) -> None:
    jobs = [Job(p, GREEDY) for p in tiny.prompts(count, seed=1)]
    engine = lane_engine(target(), head(method), 3, max_num_seqs=9)
    check_naive(target(), tiny.run(engine, jobs), jobs)
    assert {shape.batch for shape in lane_drafts(engine).decode_shapes} <= set(BATCH_SIZES)
    check_dummy(engine)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_state_of_lanes_is_the_same_with_other_dummies_beside_them(
    method: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dummy lane holds. Sizes of products do change, so compare to rounding."""
    usual = decoding(method, count)
    monkeypatch.setattr(module, "BATCH_SIZES", (16,))
    padded = decoding(method, count)
    for name in ("last_tokens", "num_computed", "draft_starts", "limits", "pending_tokens"):
        ours, theirs = (getattr(e.models.state, name)[:count] for e in (usual, padded))
        assert torch.equal(ours, theirs), name
    taps = [e.models.state.pending_taps[:count] for e in (usual, padded)]
    torch.testing.assert_close(*taps, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_what_the_dummy_lane_holds_changes_no_bit_of_the_others(method: str) -> None:
    engines = [decoding(method, 3) for _ in range(2)]
    spoiled = engines[1].models.state
    spoiled.pending_taps[spoiled.dummy] = torch.nan
    spoiled.pending_tokens[spoiled.dummy] = 7
    spoiled.last_tokens[spoiled.dummy] = 5
    spoiled.block_tables[spoiled.dummy] = 1
    shape = lane_drafts(engines[0]).decode_shapes[-1]
    assert shape.batch > 3
    lanes = list(engines[0].seating.seats)
    with torch.inference_mode():
        reports = [e.steps.decode(shape, lanes).rows().tolist() for e in engines]
    assert reports[0][:3] == reports[1][:3]
    assert [row[:HEADER] for row in reports[1][3:]] == [[0, 0, 0]] * (shape.batch - 3)
    taps = [e.models.state.pending_taps[lanes] for e in engines]
    assert torch.equal(*taps)


def test_batches_beyond_the_largest_size_are_multiples_of_it() -> None:
    assert [module.batch_size(n) for n in (1, 3, 9, 256, 257, 600)] == [1, 4, 16, 256, 512, 768]

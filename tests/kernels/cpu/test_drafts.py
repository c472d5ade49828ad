"""Best tokens, trees and walks of the C kernels are those of the references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.cpu.drafts import DraftKernels, draft_kernels
from peagle.kernels.device_batch import DeviceBatch, StepCounts, TreeRows, make_device_batch
from peagle.kernels.reference import sampling, trees
from peagle.kernels.reference.sampling import SamplingMetadata
from tests.kernels.cpu.compiler import needs_kernels

pytestmark = needs_kernels

NAN, INF = float("nan"), float("inf")
SLOTS, MOST_NODES = 5, 31
SEEDS = st.integers(0, 2**31)


def kernels() -> DraftKernels:
    found = draft_kernels()
    assert found is not None
    return found


def some(shape: tuple[int, ...], seed: int) -> Tensor:
    """Of a few values, so that there are ties; of some seeds also such as are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if seed % 2:
        values = (values * 2).round() / 2
    if seed % 3 == 0:
        odd = torch.rand(shape, generator=generator) < 0.1
        values[odd] = (NAN, INF, -INF)[seed // 3 % 3]
    return values


@settings(deadline=None)
@given(st.integers(1, 5), st.sampled_from([1, 7, 64, 100, 1000, 4099]), SEEDS, st.booleans())
def test_best_tokens_and_whether_there_are_any(
    rows: int, columns: int, seed: int, has_ids: bool
) -> None:
    logits = some((rows, columns), seed)
    if seed % 5 == 0:
        logits[0] = -INF
    ids = torch.arange(columns).flip(0) + 3 if has_ids else None
    expected = sampling.sample_tokens(logits, None, ids)
    for ours, theirs in zip(kernels().sample_tokens(logits, None, ids), expected, strict=True):
        assert torch.equal(ours, theirs)


@settings(deadline=None)
@given(st.integers(1, 5), st.sampled_from([8, 64, 100, 4099]), SEEDS, st.integers(1, 8))
def test_top_tokens_in_falling_order(rows: int, columns: int, seed: int, count: int) -> None:
    logits = some((rows, columns), seed)
    logits = logits[sampling.sample_tokens(logits).usable]
    ours, theirs = (
        operation(logits, None, None, count)
        for operation in (kernels().top_tokens, trees.top_tokens)
    )
    exact = logits.double().log_softmax(-1).float()
    for found in (ours, theirs):
        torch.testing.assert_close(found.log_probs, exact.topk(count).values, rtol=0, atol=1e-5)
    is_there = ours.log_probs > -INF
    assert torch.equal(
        logits.gather(1, ours.token_ids)[is_there], logits.topk(count).values[is_there]
    )
    for row, those in zip(ours.token_ids, is_there, strict=True):
        assert len(set(row[those].tolist())) == int(those.sum())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_on_any_threads(threads: int) -> None:
    logits, before = torch.randn(9, 50_000), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(kernels().sample_tokens(logits).token_ids, logits.argmax(1))
    finally:
        torch.set_num_threads(before)


def state() -> DeviceBatch:
    made = make_device_batch(
        SLOTS, 4, MOST_NODES, torch.device("cpu"), None, has_trees=True, keeps_scores=True
    )
    made.num_drafts.fill_(20)
    return made


def assert_same_trees(ours: DeviceBatch, theirs: DeviceBatch, slots: list[int]) -> None:
    assert torch.equal(ours.num_drafts, theirs.num_drafts)
    for slot in slots:
        size = int(ours.num_drafts[slot])
        for name in ("drafts", "draft_scores"):
            assert torch.equal(getattr(ours, name)[slot, :size], getattr(theirs, name)[slot, :size])
        for column, other in zip(ours.trees or (), theirs.trees or (), strict=True):
            rows = size + (column.shape[1] > MOST_NODES)
            assert torch.equal(column[slot, :rows], other[slot, :rows])


@settings(deadline=None, max_examples=300)
@given(
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([1, 2, 8]),
    st.integers(1, MOST_NODES),
    SEEDS,
)
def test_trees_and_walks_through_them(
    batch: int, depth: int, beam: int, num_nodes: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = state(), state()
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    token_ids = torch.randint(0, 9, (batch, depth, beam), generator=generator)
    log_probs = some((batch, depth, beam, beam), seed) - 1.0  # some above 0: they count as 0
    num_depths = torch.randint(0, depth + 1, (batch,), generator=generator)
    given = slots, token_ids, log_probs, num_depths, num_nodes
    kernels().store_tree(ours, *given)
    trees.store_tree(theirs, *given)
    assert_same_trees(ours, theirs, slots.tolist())
    size = int(ours.num_drafts[slots].max())
    drafts = ours.drafts[slots]
    assert ((drafts >= 0) & (drafts < 9)).all()  # also where there is no node: it is looked up

    num_drafts = ours.num_drafts[slots]
    tree = TreeRows(*(column[slots] for column in ours.trees or ()))
    counts = StepCounts(*[num_drafts] * 5, drafts, tree).narrowed(size, is_tree=True)
    sampled = torch.randint(0, 9, (batch, size + 1), generator=generator)
    usable = torch.rand(sampled.shape, generator=generator) < 0.9
    walked = kernels().walk_tree(counts, sampled, usable, depth)
    for one, other in zip(walked, trees.walk_tree(counts, sampled, usable, depth), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), SEEDS)
def test_accepted_rows_are_moved_in_all_layers(batch: int, depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, num_blocks = 4, 8
    tables = torch.randperm(SLOTS * num_blocks, generator=generator).int().view(SLOTS, num_blocks)
    slots = torch.randperm(SLOTS, generator=generator)[:batch]
    steps = torch.randint(1, 3, (batch, depth), generator=generator)
    num_accepted = torch.randint(0, depth + 1, (batch,), generator=generator)
    rows = torch.nn.functional.pad(steps.cumsum(1), (1, 0))
    path = trees.TreePath(*[rows] * 4, num_accepted, rows)
    starts = torch.randint(0, size * num_blocks - int(rows.max()), (batch,), generator=generator)
    caches = torch.randn(2, 3, SLOTS * num_blocks * size, 2, 5)
    ours, theirs = caches.clone(), caches.clone()
    kernels().move_rows(*ours, tables, slots, starts, path, size)
    trees.move_rows(*theirs, tables, slots, starts, path, size)
    assert torch.equal(ours, theirs)


def test_what_the_kernels_do_not_know_is_left_to_the_references() -> None:
    logits = torch.randn(2, 50)
    drawn = SamplingMetadata(
        *(torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2)),
        *(torch.arange(2), torch.arange(2)),
    )
    assert torch.equal(
        kernels().sample_tokens(logits, drawn).token_ids,
        sampling.sample_tokens(logits, drawn).token_ids,
    )
    for ours, theirs in zip(
        kernels().top_tokens(logits, drawn, None, 3),
        trees.top_tokens(logits, drawn, None, 3),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    wide = logits.double()
    assert torch.equal(kernels().sample_tokens(wide).token_ids, wide.argmax(1))
    by_path = torch.randint(0, 9, (1, 3, 4, 4)), -torch.rand(1, 3, 4, 4)
    one, other = state(), state()
    rest = torch.tensor([3]), 7
    kernels().store_tree(one, torch.tensor([2]), *by_path, *rest)
    trees.store_tree(other, torch.tensor([2]), *by_path, *rest)
    assert_same_trees(one, other, [2])

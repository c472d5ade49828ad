"""Triton's trees equal the reference's: candidates, nodes, the walk, the rows that are moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.device_batch import DeviceBatch, StepCounts, TreeRows, make_device_batch
from peagle.kernels.reference import trees as reference
from peagle.kernels.reference.sampling import SamplingMetadata
from peagle.speculation import trees

from .batch_cases import DEVICE, EXAMPLES, check_equal, copied

gpu = pytest.importorskip("peagle.kernels.gpu.trees")

seeds = st.integers(0, 2**31)


def metadata_of(rows: int, generator: torch.Generator) -> SamplingMetadata:
    """Every other row is greedy, and each kind of filter is on somewhere."""
    index = torch.arange(rows)
    return SamplingMetadata(
        *(
            column.to(DEVICE)
            for column in (
                torch.where(index % 2 == 0, 0.0, 0.9),
                torch.where(index % 3 == 1, 5, 0),
                torch.where(index % 4 == 3, 0.8, 1.0),
                torch.zeros(rows),
                torch.randint(2**40, (rows,), generator=generator),
                index + 7,
            )
        )
    )


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seeds,
    st.integers(1, 5),
    st.sampled_from([8, 9, 100, 2500]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from(["greedy", "sampled", "filtered"]),
    st.booleans(),
)
def test_candidates_are_the_references(
    seed: int, rows: int, vocab: int, count: int, sampling: str, reduced: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randperm(rows * vocab, generator=generator) * (20.0 / vocab)).view(rows, vocab)
    ids = (torch.randperm(vocab + 9, generator=generator)[:vocab]).to(DEVICE) if reduced else None
    metadata = None if sampling == "greedy" else metadata_of(rows, generator)
    arguments = logits.to(DEVICE), metadata, ids, count
    ours = gpu.top_tokens(*arguments, filters=sampling == "filtered")
    theirs = reference.top_tokens(*arguments, filters=sampling == "filtered")
    there = theirs.log_probs > -torch.inf  # which of those that cannot be sampled does not matter
    assert torch.equal(ours.log_probs > -torch.inf, there)
    assert torch.equal(ours.token_ids[there], theirs.token_ids[there])
    torch.testing.assert_close(ours.log_probs[there], theirs.log_probs[there], atol=2e-5, rtol=1e-4)


def test_a_nan_is_no_candidate() -> None:
    logits = torch.tensor([[1.0, torch.nan, 3.0, 2.0]], device=DEVICE)
    assert gpu.top_tokens(logits, None, None, 2).token_ids.tolist() == [[2, 3]]


def lattice(seed: int, batch: int, depth: int, beam: int) -> trees.Lattice:
    """Some candidates as likely as others, some impossible; with every other seed depths do not
    depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.rand(batch, depth, 30, generator=generator).argsort(-1)[..., :beam]
    logits = torch.randint(-6, 3, (batch, depth, beam, 30), generator=generator).float()
    logits[logits < -5] = -torch.inf
    log_probs = logits.log_softmax(-1)[..., :beam]
    log_probs[:, 0] = log_probs[:, 0, :1]
    if seed % 2:
        log_probs = trees.independent(log_probs[:, :, 0].to(DEVICE))
    return trees.Lattice(token_ids.to(DEVICE), log_probs.to(DEVICE))


def beam_lattice(seed: int, batch: int, depth: int, beam: int) -> trees.Lattice:
    """As a drafter has it that runs for each depth: tokens of their own behind each path."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, depth, beam, 30
    token_ids = torch.rand(shape, generator=generator).argsort(-1)[..., :beam]
    logits = torch.randint(-6, 3, shape, generator=generator).float()
    logits[logits < -5] = -torch.inf
    log_probs = logits.log_softmax(-1).sort(-1, descending=True).values[..., :beam].contiguous()
    token_ids[:, 0], log_probs[:, 0] = token_ids[:, 0, :1], log_probs[:, 0, :1]
    return trees.Lattice(token_ids.to(DEVICE), log_probs.to(DEVICE))


def tree_state(width: int) -> DeviceBatch:
    state = make_device_batch(7, 5, width, DEVICE, None, has_trees=True, keeps_scores=True)
    state.num_drafts.fill_(width)
    return state


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seeds, st.integers(1, 5), st.sampled_from([4, 8]), st.integers(1, 63), st.integers(1, 4),
    st.sampled_from([lattice, beam_lattice]),
)  # fmt: skip
def test_stored_trees_are_the_references(
    seed: int, depth: int, beam: int, num_nodes: int, batch: int, make: Callable[..., trees.Lattice]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(7, generator=generator)[:batch].to(DEVICE)
    num_depths = torch.randint(depth + 1, (batch,), generator=generator).to(DEVICE)
    ours = tree_state(num_nodes + 2)
    ours.num_drafts[slots] = torch.randint(num_nodes + 1, (batch,), generator=generator).to(DEVICE)
    theirs = copied(ours)
    arguments = slots, *make(seed, batch, depth, beam), num_depths, num_nodes
    gpu.store_tree(ours, *arguments)
    reference.store_tree(theirs, *arguments)
    assert torch.equal(ours.drafts, theirs.drafts)
    check_equal(ours.trees or (), theirs.trees or ())
    assert torch.equal(ours.numbers, theirs.numbers)
    assert ours.draft_scores is not None
    assert theirs.draft_scores is not None
    torch.testing.assert_close(ours.draft_scores, theirs.draft_scores, atol=1e-5, rtol=1e-6)


def test_a_tree_of_63_nodes_and_15_depths() -> None:
    ours, slots = tree_state(63), torch.tensor([3, 0], device=DEVICE)
    theirs = copied(ours)
    arguments = slots, *lattice(5, 2, 15, 8), torch.tensor([15, 9], device=DEVICE), 63
    gpu.store_tree(ours, *arguments)
    reference.store_tree(theirs, *arguments)
    assert torch.equal(ours.drafts, theirs.drafts)
    check_equal(ours.trees or (), theirs.trees or ())


def test_a_tree_of_one_depth_has_no_more_nodes_than_candidates() -> None:
    """Behind them neither the slot's tree is written nor the next slot's scratch."""
    ours, slots = tree_state(31), torch.tensor([3, 0], device=DEVICE)
    theirs = copied(ours)
    arguments = slots, *lattice(5, 2, 1, 8), torch.tensor([1, 1], device=DEVICE), 31
    gpu.store_tree(ours, *arguments)
    reference.store_tree(theirs, *arguments)
    assert torch.equal(ours.drafts, theirs.drafts)
    check_equal(ours.trees or (), theirs.trees or ())


@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(2, 5), st.sampled_from([1, 4, 8]), st.integers(1, 4))
def test_a_beam_extended_depth_by_depth_is_the_references_and_the_trees(
    seed: int, depth: int, beam: int, batch: int
) -> None:
    token_ids, log_probs = beam_lattice(seed, batch, depth, beam)
    log_probs[0, -1, 0, 0] = torch.nan
    parents = token_ids.new_zeros(2, batch, (depth - 1) * beam)
    ours = theirs = None
    for d in range(depth - 1):
        width = 1 if d == 0 else beam
        level = token_ids[:, d, :width], log_probs[:, d, :width]
        ours = gpu.extend_beam(ours, *level, parents[0], 1 + d * beam)
        theirs = reference.extend_beam(theirs, *level, parents[1], 1 + d * beam)
        check_equal(ours, theirs)
    assert torch.equal(*parents)
    assert ours is not None
    assert torch.equal(ours.ancestors, trees.ancestors(parents[0])[:, -beam:])
    # The nodes of the last depth that has rows are continuations of these very paths.
    tree = trees.grow_tree(token_ids[:, :-1], log_probs[:, :-1], 999)
    for b in range(batch):
        own = trees.depths(tree.parents)[b, 1:] == depth - 1
        best = tree.token_ids[b][own][:beam], tree.scores[b][own][:beam]
        assert torch.equal(best[0], ours.token_ids[b])
        assert torch.equal(best[1], ours.scores[b])


@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(1, 5), st.sampled_from([4, 8]), st.integers(1, 4))
def test_the_chain_is_the_references(seed: int, depth: int, beam: int, batch: int) -> None:
    arguments = lattice(seed, batch, depth, beam)
    assert torch.equal(gpu.best_chain(*arguments), reference.best_chain(*arguments))


def counts_of(seed: int, batch: int, size: int) -> StepCounts:
    """Random trees over few tokens, so that the target often goes on."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(0, n + 1, (batch,), generator=generator) for n in range(size)]
    parents = torch.stack(columns, 1) if size else torch.zeros(batch, 0, dtype=torch.int64)
    drafts = torch.randint(3, (batch, size), generator=generator)
    num_drafts = torch.randint(size + 1, (batch,), generator=generator)
    tree = TreeRows(parents, trees.depths(parents), trees.ancestors(parents))
    starts = torch.randint(9, (batch,), generator=generator)
    numbers = (starts, num_drafts, num_drafts + 1, starts, starts)
    return StepCounts(
        *(n.to(DEVICE) for n in numbers), drafts.to(DEVICE), TreeRows(*(t.to(DEVICE) for t in tree))
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(0, 20), st.integers(1, 6))
def test_the_walk_is_the_references(seed: int, batch: int, size: int, depth: int) -> None:
    counts = counts_of(seed, batch, size)
    generator = torch.Generator().manual_seed(seed + 1)
    sampled = torch.randint(3, (batch, size + 1), generator=generator).to(DEVICE)
    usable = (torch.rand(batch, size + 1, generator=generator) < 0.9).to(DEVICE)
    ours = gpu.walk_tree(counts, sampled, usable, depth)
    check_equal(ours, reference.walk_tree(counts, sampled, usable, depth))


@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 40), st.data())
def test_shared_rows_are_the_references_and_go_to_the_most_probable_drafts(
    seed: int, batch: int, size: int, data: st.DataObject
) -> None:
    counts, state = counts_of(seed, batch, size), tree_state(size + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    scores = -torch.randint(0, 9, (8, size + 1), generator=generator).float()  # some are equal
    assert state.draft_scores is not None
    state.draft_scores.copy_(scores.sort(descending=True).values)
    ended = torch.rand(batch, generator=generator) < 0.2
    counts = counts._replace(num_rows=counts.num_rows.masked_fill(ended.to(DEVICE), 0))
    slots = torch.randperm(7, generator=generator)[:batch].to(DEVICE)
    num_rows = data.draw(st.integers(batch, batch * (size + 1)))
    ours, shared = gpu.share_rows(state, slots, counts, num_rows)
    theirs, expected = reference.share_rows(state, slots, counts, num_rows)
    check_equal(ours[:-1], theirs[:-1])
    check_equal(shared, expected)
    lengths = shared.starts.diff().tolist()
    rows = [b * (size + 1) + j for b, length in enumerate(lengths) for j in range(length)]
    assert shared.places.tolist() == rows
    assert len(rows) == num_rows
    assert min(lengths) > 0
    own, drafts = state.draft_scores[slots].tolist(), counts.num_drafts.tolist()
    given = [own[b][j] for b in range(batch) for j in range(int(ours.num_drafts[b]))]
    left = [own[b][j] for b in range(batch) for j in range(int(ours.num_drafts[b]), drafts[b])]
    assert len(given) == min(sum(drafts), num_rows - batch)
    assert min(given, default=0.0) >= max(left, default=-99.0)
    assert ours.num_rows.tolist() == [
        0 if over else n + 1
        for over, n in zip((counts.num_rows == 0).tolist(), ours.num_drafts.tolist(), strict=True)
    ]


@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), st.data())
def test_the_walk_through_shared_rows_is_that_through_all(
    seed: int, batch: int, size: int, depth: int, data: st.DataObject
) -> None:
    counts, state = counts_of(seed, batch, size), tree_state(size)
    generator = torch.Generator().manual_seed(seed + 1)
    assert state.draft_scores is not None
    state.draft_scores.copy_(-torch.rand(8, size, generator=generator).cumsum(1))
    num_rows = data.draw(st.integers(batch, batch * (size + 1)))
    slots = torch.arange(batch, device=DEVICE)
    counts, shared = reference.share_rows(state, slots, counts, num_rows)
    sampled = torch.randint(3, (batch, size + 1), generator=generator).to(DEVICE)
    usable = (torch.rand(batch, size + 1, generator=generator) < 0.9).to(DEVICE)
    packed = sampled.flatten()[shared.places], usable.flatten()[shared.places]
    ours = gpu.walk_tree(counts, *packed, depth, shared)
    check_equal(ours, reference.walk_tree(counts, *packed, depth, shared))
    whole = reference.walk_tree(counts, sampled, usable, depth)
    check_equal(ours[:-1], whole[:-1])
    rows, before, is_leaf = ours.report.split([depth, depth, 1], dim=1)
    assert torch.equal(torch.cat((rows, is_leaf), dim=1), whole.report)
    assert torch.equal(before, shared.ranks.gather(1, rows) - batch)
    states = torch.randn(batch * (size + 1), 3, device=DEVICE)
    path = ours.rows, size + 1
    for rows_of in (gpu.path_rows, reference.path_rows):
        taken = rows_of(states[shared.places], *path, shared.starts)
        assert torch.equal(taken, reference.path_rows(states, *path))


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 12), st.sampled_from([(1, 8), (3, 8), (9, 64)]))
def test_moved_rows_are_the_references(
    seed: int, batch: int, size: int, heads: tuple[int, int]
) -> None:
    counts, block_size = counts_of(seed, batch, size), 4
    generator = torch.Generator().manual_seed(seed + 1)
    sampled = torch.randint(3, (batch, size + 1), generator=generator).to(DEVICE)
    path = reference.walk_tree(counts, sampled, sampled >= 0, 5)
    tables = torch.randperm(batch * 8, generator=generator).view(batch, 8).int().to(DEVICE)
    slots = torch.randperm(batch, generator=generator).to(DEVICE)
    keys, values = (torch.randn(2, batch * 32, *heads, generator=generator) for _ in "kv")
    ours, theirs = ([c.clone().to(DEVICE) for c in (keys, values)] for _ in "ab")
    arguments = tables, slots, counts.num_computed, path, block_size
    gpu.move_rows(*ours, *arguments)
    reference.move_rows(*theirs, *arguments)
    check_equal(tuple(ours), tuple(theirs))


def test_a_row_whose_place_is_anothers_source_is_not_lost() -> None:
    path = reference.TreePath(
        *(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE) for _ in range(3)),
        torch.tensor([[0, 2, 3, 3]], device=DEVICE),
        *(torch.tensor([n], device=DEVICE) for n in (2, 1)),
    )
    cache = torch.arange(8.0, device=DEVICE).view(1, 8, 1, 1).repeat(1, 1, 1, 600)
    keys, values = cache.clone(), cache.clone()
    tables = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    first = torch.tensor([0], device=DEVICE)
    gpu.move_rows(keys, values, tables, first, first + 2, path, 4)
    for moved in (keys, values):
        assert moved[0, :, 0, 0].tolist() == [0, 1, 2, 4, 5, 5, 6, 7]
        assert torch.equal(moved[..., 0], moved[..., 599])


@pytest.mark.parametrize("columns", [1, 48, 1100])
def test_rows_of_a_path_are_copied(columns: int) -> None:
    x = torch.randn(12, columns, device=DEVICE)
    rows = torch.tensor([[0, 3, 3], [0, 1, 2], [0, 0, 0]], device=DEVICE)
    assert torch.equal(gpu.path_rows(x, rows, 4), reference.path_rows(x, rows, 4))

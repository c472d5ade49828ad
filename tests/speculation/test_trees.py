"""Trees: the best paths of a lattice, and the walk that the target takes through them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.speculation.trees import (
    Lattice,
    Tree,
    ancestors,
    best_chain,
    depths,
    grow_tree,
    independent,
    num_candidates,
    walk_tree,
)
from peagle.speculation.verify import verify_coupled

seeds = st.integers(0, 2**31)


def lattice(seed: int, batch: int, depth: int, beam: int) -> Lattice:
    """Candidates distinct at each depth, some as likely as others; depths that depend on each other
    but for the first, which nothing stands before."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.rand(batch, depth, 20, generator=generator).argsort(-1)[..., :beam]
    logits = torch.randint(-6, 3, (batch, depth, beam, 20), generator=generator).float()
    log_probs = logits.log_softmax(-1)[..., :beam]
    log_probs[:, 0] = log_probs[:, 0, :1]
    return Lattice(token_ids, log_probs)


def path_score(lattice: Lattice, b: int, places: Sequence[int]) -> float:
    """Of the candidates at these places, each behind the one before."""
    before = [0, *places]
    steps = zip(before, places, strict=False)
    return sum(lattice.log_probs[b, d, p, q].item() for d, (p, q) in enumerate(steps))


def random_parents(seed: int, batch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [torch.randint(0, n + 1, (batch,), generator=generator) for n in range(size)], dim=1
    )


def paths(tree: Tree, b: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[b].tolist(), tree.parents[b].tolist(), strict=True):
        assert parent < len(found), "a parent comes before its children"
        found.append((*found[parent], token))
    return found[1:]


@settings(deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 5), st.integers(1, 40))
def test_nodes_are_distinct_paths_in_falling_order_of_their_probability(
    seed: int, depth: int, beam: int, size: int
) -> None:
    size = min(size, num_candidates(depth, beam))
    drawn = lattice(seed, 3, depth, beam)
    tree = grow_tree(*drawn, size)
    for b in range(3):
        nodes, scores = paths(tree, b), tree.scores[b].tolist()
        assert len(set(nodes)) == size
        assert scores == sorted(scores, reverse=True)
        for node, score in zip(nodes, scores, strict=True):
            places = [drawn.token_ids[b, d].tolist().index(t) for d, t in enumerate(node)]
            assert score == pytest.approx(path_score(drawn, b, places), abs=1e-4)


@pytest.mark.slow
@settings(deadline=None)
@given(seeds, st.integers(1, 3), st.integers(1, 12))
def test_with_a_beam_that_holds_them_all_the_best_nodes_are_found(
    seed: int, depth: int, size: int
) -> None:
    drawn = lattice(seed, 1, depth, 12)
    size = min(size, num_candidates(depth, 12))
    tree = grow_tree(*drawn, size)
    every = [
        path_score(drawn, 0, path)
        for length in range(1, depth + 1)
        for path in itertools.product(range(12), repeat=length)
    ]
    expected = sorted(every, reverse=True)[:size]
    assert tree.scores[0].tolist() == pytest.approx(expected, abs=1e-4)


@given(seeds, st.integers(1, 5))
def test_a_beam_of_one_is_a_chain(seed: int, depth: int) -> None:
    drawn = lattice(seed, 2, depth, 1)
    tree = grow_tree(*drawn, depth)
    assert tree.token_ids.tolist() == drawn.token_ids[:, :, 0].tolist()
    assert tree.parents.tolist() == [list(range(depth))] * 2
    assert best_chain(*drawn).tolist() == drawn.token_ids[:, :, 0].tolist()


@given(seeds, st.integers(1, 5), st.integers(1, 6))
def test_the_chain_takes_the_best_candidate_behind_the_one_before(
    seed: int, depth: int, beam: int
) -> None:
    drawn = lattice(seed, 2, depth, beam)
    chain = best_chain(*drawn)
    for b in range(2):
        place = 0
        for d in range(depth):
            scores = drawn.log_probs[b, d, place].tolist()
            place = scores.index(max(scores))
            assert chain[b, d] == drawn.token_ids[b, d, place]


def test_the_best_paths_go_on() -> None:
    token_ids = torch.tensor([[[1, 2, 3]] * 4])
    log_probs = torch.tensor([[[0.9, 0.06, 0.04]] * 4]).log()
    assert paths(grow_tree(token_ids, independent(log_probs), 4), 0) == [
        (1,),
        (1, 1),
        (1,) * 3,
        (1,) * 4,
    ]


def test_a_probability_that_is_rounded_above_one_puts_no_child_before_its_parent() -> None:
    token_ids = torch.tensor([[[1, 2]] * 3])
    log_probs = torch.tensor([[[1e-6, -20.0]] * 3])
    assert paths(grow_tree(token_ids, independent(log_probs), 3), 0) == [(1,), (1, 1), (1, 1, 1)]


def test_what_cannot_follow_comes_last_and_a_nan_is_such_a_thing() -> None:
    token_ids = torch.tensor([[[4, 7], [5, 9]]])
    log_probs = torch.tensor([[[-0.5, -torch.inf], [-0.5, torch.nan]]])
    tree = grow_tree(token_ids, independent(log_probs), 6)
    assert paths(tree, 0)[:2] == [(4,), (4, 5)]
    assert tree.scores[0, 2:].tolist() == [-torch.inf] * 4
    assert len(set(paths(tree, 0))) == 6  # and are still nodes of one tree


@given(seeds, st.integers(0, 20))
def test_depths_and_ancestors_follow_the_parents(seed: int, size: int) -> None:
    parents = random_parents(seed, 2, size) if size else torch.zeros(2, 0, dtype=torch.int64)
    for b in range(2):
        lines: list[list[int]] = [[0]]
        for n, parent in enumerate(parents[b].tolist(), start=1):
            lines.append([*lines[parent], n])
        assert depths(parents)[b].tolist() == [len(line) - 1 for line in lines]
        assert ancestors(parents)[b].tolist() == [sum(1 << r for r in line) for line in lines]


def test_the_last_of_63_nodes_is_the_last_bit() -> None:
    bits = ancestors(torch.zeros(1, 63, dtype=torch.int64))[0]
    assert bits[63].item() == -(2**63) + 1


@settings(deadline=None)
@given(seeds, st.integers(1, 12), st.integers(1, 4), st.integers(2, 4))
def test_the_walk_goes_on_while_a_child_carries_the_targets_token(
    seed: int, size: int, depth: int, vocab: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(seed, 4, size)
    tokens = torch.randint(0, vocab, (4, size), generator=generator)
    target = torch.randint(0, vocab, (4, size + 1), generator=generator)
    counts = torch.randint(0, size + 1, (4,), generator=generator)
    walk = walk_tree(tokens, parents, counts, target, depth)
    for b in range(4):
        rows = [0]
        while len(rows) <= depth:
            children = [
                n + 1
                for n in range(int(counts[b]))
                if parents[b, n] == rows[-1] and tokens[b, n] == target[b, rows[-1]]
            ]
            if not children:
                break
            rows.append(children[0])
        assert walk.num_accepted[b] == len(rows) - 1
        assert walk.rows[b].tolist() == rows + [rows[-1]] * (depth + 1 - len(rows))


@given(seeds, st.integers(1, 6))
def test_on_a_chain_the_walk_is_coupled_verification(seed: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 2, (5, depth), generator=generator)
    target = torch.randint(0, 2, (5, depth + 1), generator=generator)
    counts = torch.randint(0, depth + 1, (5,), generator=generator)
    chain = torch.arange(depth).expand(5, depth)
    walk = walk_tree(drafts, chain, counts, target, depth)
    assert (
        walk.num_accepted.tolist() == verify_coupled(target, drafts, counts).num_accepted.tolist()
    )

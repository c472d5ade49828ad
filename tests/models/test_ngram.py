"""The n-gram drafter, against its definition."""

from __future__ import annotations

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.models.ngram import MAX_MATCHES, NgramDrafter

histories = st.lists(st.integers(0, 3), max_size=30)


def draft(history: list[int], count: int, shortest: int = 2, longest: int = 4) -> list[int]:
    return drafts([(history, count)], shortest, longest)[0]


def drafts(asked: list[tuple[list[int], int]], shortest: int, longest: int) -> list[list[int]]:
    histories, counts = [h for h, _ in asked], [k for _, k in asked]
    return [d.token_ids for d in NgramDrafter(shortest, longest).propose(histories, counts)]


def defined(history: list[int], count: int, shortest: int, longest: int) -> list[int]:
    """The longest suffix that occurs earlier; its most recent earlier occurrence; what followed,
    and where the history ends, what the drafts themselves continue."""
    for size in range(longest, shortest - 1, -1):
        suffix = history[len(history) - size :] if size <= len(history) else None
        for start in reversed(range(len(history) - size)):
            if history[start : start + size] == suffix:
                text = list(history)
                for offset in range(count):
                    text.append(text[start + size + offset])
                return text[len(history) :]
    return []


@given(histories, st.integers(0, 9), st.integers(1, 3), st.integers(0, 3))
def test_drafts_continue_the_latest_occurrence_of_the_longest_suffix(
    history: list[int], count: int, shortest: int, more: int
) -> None:
    longest = shortest + more
    assert draft(history, count, shortest, longest) == defined(history, count, shortest, longest)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=5, unique=True), st.integers(0, 20))
def test_a_period_goes_on(period: list[int], count: int) -> None:
    wanted = (period * 30)[:count]
    assert draft(period * 4, count) == wanted


@given(st.lists(st.tuples(histories, st.integers(0, 5)), max_size=4))
def test_each_sequence_is_drafted_from_its_own_history(asked: list[tuple[list[int], int]]) -> None:
    assert drafts(asked, 2, 4) == [draft(history, count) for history, count in asked]


def tree(
    history: list[int], count: int, depth: int, shortest: int = 1, longest: int = 3
) -> dict[tuple[int, ...], float]:
    """The paths of a tree with their probabilities, in order."""
    [draft] = NgramDrafter(shortest, longest).propose_trees([history], [count], [depth])
    assert draft.parents is not None
    assert draft.scores is not None
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], map(exp, draft.scores), strict=True))


@given(histories.filter(bool), st.integers(0, 20), st.integers(0, 6))
def test_nodes_of_a_tree_are_continuations_of_earlier_matches_the_most_probable_first(
    history: list[int], count: int, depth: int
) -> None:
    whole, found = tree(history, 999, depth), tree(history, count, depth)
    assert list(found) == list(whole)[:count]  # any first nodes are the best
    assert list(whole.values()) == sorted(whole.values(), reverse=True)
    for path, probability in whole.items():
        assert 0 < probability < whole.get(path[:-1], 1.0)
        assert len(path) <= depth
        assert path[:-1] in whole or len(path) == 1
    ends = [n + 1 for n, token in enumerate(history[:-1]) if token == history[-1]]
    if depth and len(ends) <= MAX_MATCHES:
        assert {path[0] for path in whole} == {history[n] for n in ends}
    assert bool(whole) == bool(depth and ends)


@given(histories.filter(bool), st.integers(1, 6))
def test_a_history_with_one_match_has_the_chain_as_its_tree(history: list[int], count: int) -> None:
    history = [*history, 99, 7, 8, 9, 99]
    chain = draft(history, count, 1, 3)
    assert list(tree(history, count, count)) == [tuple(chain[: n + 1]) for n in range(count)]


def test_what_followed_more_often_longer_or_later_is_more_probable() -> None:
    assert list(tree([1, 5] * 2 + [1, 6, 1], 2, 1, longest=1)) == [(6,), (5,)]  # 1 > 5 / 6
    assert list(tree([1, 5] * 3 + [1, 6, 1], 2, 1, longest=1)) == [(5,), (6,)]  # 13 / 12
    assert list(tree([1, 5, 1, 6, 1], 2, 1)) == [(6,), (5,)]  # the latest
    assert list(tree([2, 1, 5, 1, 6, 2, 1], 2, 1)) == [(5,), (6,)]  # behind a longer match
    one = tree([1, 5, 1, 6, 1], 2, 1)
    assert list(one.values()) == pytest.approx([1.0 / 2.5, 0.5 / 2.5])
    assert tree([1, 2, 3, 4], 5, 3) == {}


def test_matches_of_any_length_become_a_tree() -> None:
    assert list(tree([1, 2, 3] * 400, 3, 3, longest=1000)) == [(1,), (1, 2), (1, 2, 3)]


def test_ids_that_are_surrogates_as_code_points_are_ids_like_any_other() -> None:
    assert draft([0xD800, 0xDC00, 7, 8, 0xD800, 0xDC00], 2) == [7, 8]


def test_a_suffix_that_never_occurred_drafts_nothing() -> None:
    assert draft([1, 2, 3, 4], 5) == []
    assert draft([], 5) == []
    assert draft([1, 1], 5) == []  # shorter than the shortest n-gram and its occurrence
    assert draft([1, 1, 1], 5) == [1] * 5

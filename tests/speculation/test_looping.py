"""Loops are found exactly as looping.py defines them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.speculation.looping import (
    MAX_PERIOD,
    MIN_COPIES,
    MIN_TOKENS,
    is_looping,
    loop_start,
)


def slow_loop_start(ids: list[int]) -> int | None:
    """The definition, read aloud."""
    for start in range(len(ids)):
        for period in range(1, MAX_PERIOD + 1):
            end = start + max(MIN_COPIES * period, MIN_TOKENS)
            if end <= len(ids) and ids[start + period : end] == ids[start : end - period]:
                return start
    return None


PHRASES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 12)), max_size=4
)


@given(PHRASES)
@settings(max_examples=200)
def test_loops_are_where_the_definition_says(phrases) -> None:
    ids = [token for phrase, copies in phrases for token in phrase * copies]
    assert loop_start(ids) == slow_loop_start(ids)
    assert is_looping(ids) == (slow_loop_start(ids) is not None)


def distinct(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


@pytest.mark.parametrize("period", [8, 9, 30, MAX_PERIOD])
def test_three_copies_are_a_loop_and_one_token_less_is_not(period: int) -> None:
    ids = distinct(5) + list(range(period)) * 3
    assert loop_start(ids) == 5
    assert loop_start(ids[:-1]) is None
    assert loop_start([*ids, 7777, 7778]) == 5  # the answer went on after the loop


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_short_periods_need_24_tokens(period: int) -> None:
    ids = (list(range(period)) * MIN_TOKENS)[:MIN_TOKENS]
    assert loop_start(distinct(3) + ids) == 3
    assert not is_looping(distinct(3) + ids[:-1])


def test_longer_periods_are_not_looked_for() -> None:
    assert not is_looping(list(range(MAX_PERIOD + 1)) * 3)


def test_the_earliest_loop_counts() -> None:
    assert loop_start(distinct(4) + list(range(10)) * 3 + [5] * 40) == 4


def test_short_or_empty_answers_do_not_loop() -> None:
    assert not is_looping([])
    assert not is_looping([1] * 23)


def test_tuples_are_read_too() -> None:
    assert loop_start((1,) * 24) == 0

"""Acceptance counters add up as vLLM's do."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.speculation.statistics import SpecDecodeStats

STEPS = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=12
)


def observed(steps: list[tuple[int, int]]) -> SpecDecodeStats:
    stats = SpecDecodeStats()
    for num_draft, num_accepted in steps:
        stats.observe(num_draft, num_accepted)
    return stats


def test_counts_of_a_known_run() -> None:
    stats = observed([(3, 3), (3, 1), (3, 0), (0, 0), (1, 1)])
    assert (stats.num_steps, stats.num_drafts) == (5, 4)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 5)
    assert stats.num_draft_tokens_per_pos == [4, 3, 3]
    assert stats.num_reached_tokens_per_pos == [4, 2, 1]
    assert stats.num_accepted_tokens_per_pos == [3, 1, 1]
    assert stats.mean_acceptance_length == 1 + 5 / 4
    assert stats.acceptance_rate == 0.5
    assert stats.per_position_acceptance == [3 / 4, 1 / 4, 1 / 4]
    assert stats.conditional_acceptance == [3 / 4, 1 / 2, 1.0]


def test_a_path_that_ended_in_a_leaf_was_not_rejected() -> None:
    """Trees of 5 nodes, 3 deep: the second has nothing behind its only accepted node."""
    stats = SpecDecodeStats()
    for num_accepted, is_leaf in ((2, False), (1, True), (0, False), (3, True), (0, True)):
        stats.observe(5, num_accepted, depth=3, is_leaf=is_leaf)
    assert stats.num_accepted_tokens_per_pos == [3, 2, 1]
    assert stats.num_reached_tokens_per_pos == [4, 2, 2]
    assert stats.conditional_acceptance == [3 / 4, 1.0, 1 / 2]
    assert stats.per_position_acceptance == [3 / 5, 2 / 5, 1 / 5]
    assert stats.mean_acceptance_length == 1 + 6 / 5


def test_no_drafts_give_neutral_numbers_and_no_nan() -> None:
    for stats in (SpecDecodeStats(), observed([(0, 0)])):
        assert stats.mean_acceptance_length == 1.0
        assert stats.acceptance_rate == 0.0
        assert stats.per_position_acceptance == stats.conditional_acceptance == []


@given(STEPS)
def test_length_is_one_plus_the_sum_over_positions(steps) -> None:
    stats = observed(steps)
    total = 1 + sum(stats.per_position_acceptance)
    assert math.isclose(stats.mean_acceptance_length, total)


@pytest.mark.slow
@given(STEPS, STEPS)
def test_merging_equals_observing_everything(first, second) -> None:
    merged, other = observed(first), observed(second)
    merged.draft_time, other.draft_time = 1.0, 2.0
    merged.num_output_tokens, other.num_output_tokens = 5, 6
    kept = other.as_dict()
    merged.merge(other)
    expected = observed(first + second)
    expected.draft_time, expected.num_output_tokens = 3.0, 11
    assert merged == expected
    assert other.as_dict() == kept


def test_merging_into_empty_stats_copies_the_lists() -> None:
    stats, other = SpecDecodeStats(), observed([(2, 1)])
    stats.merge(other)
    stats.observe(2, 2)
    assert other == observed([(2, 1)])


def test_as_dict_is_json_with_counters_and_rates() -> None:
    document = json.loads(json.dumps(observed([(2, 1), (2, 2)]).as_dict()))
    assert document["num_accepted_tokens_per_pos"] == [2, 1]
    assert document["mean_acceptance_length"] == 2.5
    assert document["conditional_acceptance"] == [1.0, 0.5]
    assert document["verify_time"] == 0.0


@pytest.mark.parametrize(("num_draft", "num_accepted"), [(2, 3), (0, 1), (1, -1)])
def test_impossible_steps_are_our_bug(num_draft: int, num_accepted: int) -> None:
    with pytest.raises(AssertionError):
        SpecDecodeStats().observe(num_draft, num_accepted)

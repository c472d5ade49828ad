"""The mean over all replays is that of trying every outcome."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.evaluate.replay import ExpectedStats, Limits, expected_replay, replay, run_lengths

DEPTH = 3
CHANCES = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(
    st.lists(st.booleans(), min_size=2, max_size=5),
    st.data(),
    st.integers(1, DEPTH),
    st.sampled_from([None, 2, 4]),
)
def test_the_expected_replay_is_the_mean_over_all_outcomes(
    mask: list[bool], data: st.DataObject, k: int, max_tokens: int | None
) -> None:
    anchors = len(mask)
    chances = [[data.draw(CHANCES) for _ in range(DEPTH)] for _ in range(anchors)]
    limits = Limits(max_tokens=max_tokens, max_model_len=6)
    # An outcome of an anchor is how many drafts in a row are right there.
    distributions = [outcomes(row) for row in chances]
    drafts, accepted = 0.0, [0.0] * k
    for leading in itertools.product(range(DEPTH + 1), repeat=anchors):
        weight = 1.0
        for anchor, count in enumerate(leading):
            weight *= distributions[anchor][count]
        if weight == 0.0:
            continue
        stats = replay(mask, leading, k, limits)
        drafts += weight * stats.num_drafts
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            accepted[position] += weight * count
    ours = expected_replay(mask, chances, k, limits)
    assert ours.num_drafts == pytest.approx(drafts)
    assert ours.accepted_per_pos == pytest.approx(accepted)


def outcomes(chances: list[float]) -> list[float]:
    """Chance of exactly 0, 1, ... right drafts in a row."""
    probs, reached = [], 1.0
    for chance in chances:
        probs.append(reached * (1 - chance))
        reached *= chance
    return [*probs, reached]


def test_runs_and_merging() -> None:
    assert run_lengths([True, True, False, True]) == [2, 1, 0, 1]
    total = ExpectedStats()
    for _ in range(2):
        total.merge(ExpectedStats(2.0, [2.0, 1.0], [1.0, 0.5]))
    assert total.mean_acceptance_length == pytest.approx(1.75)
    assert total.conditional_acceptance == [0.5, 0.5]
    assert ExpectedStats().mean_acceptance_length == 1.0

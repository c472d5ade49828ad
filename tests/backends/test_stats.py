"""vLLM's per-step counts in our convention: only drafts that could become output are counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.backends.vllm.stats import answer_stats, read_counters
from peagle.speculation.statistics import SpecDecodeStats


def test_whole_steps_are_counted_as_they_are() -> None:
    stats = answer_stats([3, 3], [2, 0], num_tokens=5, room=100, stopped=True)
    assert stats.num_drafts == 2
    assert stats.num_draft_tokens == 6
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]
    assert stats.num_output_tokens == 5
    assert stats.num_steps == 3  # the one after the prompt, too


def test_drafts_past_max_tokens_are_left_out() -> None:
    # 1 token from the prompt, then 3 drafts all kept: of the 4 tokens only 2 have room.
    stats = answer_stats([3], [3], num_tokens=3, room=3, stopped=False)
    assert stats.num_draft_tokens == 1
    assert stats.num_accepted_tokens == 1


def test_a_last_step_without_room_for_a_draft_verified_none() -> None:
    stats = answer_stats([3, 3], [3, 2], num_tokens=6, room=6, stopped=False)
    assert stats.num_drafts == 1
    assert stats.num_steps == 3


def test_drafts_behind_a_stop_token_are_not_counted_as_kept() -> None:
    # The second of three kept drafts ended the answer.
    stats = answer_stats([3], [3], num_tokens=3, room=100, stopped=True)
    assert stats.num_draft_tokens == 3
    assert stats.num_accepted_tokens == 2


def test_an_answer_without_counts_has_output_alone() -> None:
    stats = answer_stats((), (), num_tokens=4, room=9, stopped=True)
    assert (stats.num_drafts, stats.num_output_tokens) == (0, 4)


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 60))
def test_accepted_and_bonus_tokens_never_exceed_the_answer(accepted: list[int], room: int) -> None:
    kept: list[int] = []  # vLLM stops once the room is used
    while len(kept) < len(accepted) and 1 + sum(a + 1 for a in kept) < room:
        kept.append(accepted[len(kept)])
    num_tokens = min(1 + sum(a + 1 for a in kept), room)
    stats = answer_stats([5] * len(kept), kept, num_tokens=num_tokens, room=room, stopped=False)
    assert stats.num_accepted_tokens + stats.num_steps == num_tokens


def test_counters_of_several_engines_are_added() -> None:
    def counter(name: str, value: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value)

    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
    stats = read_counters(
        [
            counter("num_drafts", 4),
            counter("num_drafts", 1),
            counter("num_draft_tokens", 10),
            counter("num_accepted_tokens", 5),
            SimpleNamespace(name=per_position, values=[3, 2]),
            SimpleNamespace(name=per_position, values=[1]),
            SimpleNamespace(name="vllm:generation_tokens", value=99),
        ]
    )
    assert stats.num_drafts == 5
    assert stats.num_accepted_tokens_per_pos == [4, 2]
    assert stats.mean_acceptance_length == pytest.approx(2.0)


def test_an_engine_without_a_drafter_has_no_counters() -> None:
    assert read_counters([]) == SpecDecodeStats()

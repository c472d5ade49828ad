"""Acceptance as vLLM counts it, as SpecDecodeStats.

vLLM keeps two accounts: per request, step by step, and totals for the whole engine as Prometheus
counters. Both count every draft that was verified, also those behind the token that ended the
answer, and vLLM drafts K tokens even where `max_tokens` leaves room for fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

from peagle.speculation.statistics import SpecDecodeStats

PREFIX = "vllm:spec_decode_"


class Counter(Protocol):
    """One of vLLM's: a number, or one number per draft position."""

    name: str


def answer_stats(
    drafted: Sequence[int], accepted: Sequence[int], *, num_tokens: int, room: int, stopped: bool
) -> SpecDecodeStats:
    """One answer's steps, counted as the embedded engine counts them.

    `drafted` and `accepted` are vLLM's, per step that verified drafts. `room` is the most tokens
    the answer could have had, `num_tokens` how many it has, `stopped` whether a stop token or
    string ended it. Drafts that could not have become output are left out.
    """
    stats = SpecDecodeStats(num_output_tokens=num_tokens)
    if num_tokens:
        stats.observe(0, 0)  # the step that follows the prompt
    position = 1
    for num_drafted, num_accepted in zip(drafted, accepted, strict=True):
        useful = min(num_drafted, room - position - 1)
        kept = min(num_accepted, useful)
        if stopped:
            kept = min(kept, num_tokens - position)
        stats.observe(useful, kept)
        position += num_accepted + 1
    return stats


def read_counters(metrics: Iterable[Counter]) -> SpecDecodeStats:
    """The engine's totals since it started, in vLLM's own counting.

    vLLM does not count steps without drafts, nor how far verification reached.
    """
    stats = SpecDecodeStats()
    for metric in metrics:
        name = metric.name.removeprefix(PREFIX)
        if name == "num_accepted_tokens_per_pos":
            stats.num_accepted_tokens_per_pos = [
                a + b
                for a, b in zip_longest(
                    stats.num_accepted_tokens_per_pos, _values(metric), fillvalue=0
                )
            ]
        elif name == "num_drafts":
            stats.num_drafts += _value(metric)
        elif name == "num_draft_tokens":
            stats.num_draft_tokens += _value(metric)
        elif name == "num_accepted_tokens":
            stats.num_accepted_tokens += _value(metric)
    return stats


def _value(metric: object) -> int:
    return int(metric.value)  # type: ignore[attr-defined]


def _values(metric: object) -> list[int]:
    return list(metric.values)  # type: ignore[attr-defined]

"""Acceptance by context length: a head that was trained on short texts is found out here.

Twice. As an engine steps: what it would report of the requests that have so many tokens. And per
token, as if a step began at every token of an answer: an engine jumps over what is easy, so its
steps begin at other tokens with every K and N, while these are always the same ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peagle.evaluate.evaluator import Document, totals
from peagle.evaluate.replay import all_steps, visited_steps
from peagle.speculation.statistics import SpecDecodeStats

BOUNDS = (512, 1024, 2048, 4096, 8192)  # tokens of a request, its newest included
NAMES = (
    f"<{BOUNDS[0]}",
    *(f"{low}-{high}" for low, high in pairwise(BOUNDS)),
    f">={BOUNDS[-1]}",
)


@dataclass(frozen=True)
class ContextAcceptance:
    """By group of documents: the statistics of each length in NAMES."""

    as_steps: Mapping[str, Sequence[SpecDecodeStats]]
    per_token: Mapping[str, Sequence[SpecDecodeStats]]

    def as_dict(self) -> dict[str, Any]:
        return {group: self._lengths(group) for group in self.as_steps}

    def _lengths(self, group: str) -> dict[str, Any]:
        """Lengths at which nothing was drafted are left out."""
        pairs = zip(NAMES, self.as_steps[group], self.per_token[group], strict=True)
        return {
            name: {
                "steps": steps.num_drafts,
                "acceptance_length": round(steps.mean_acceptance_length, 4),
                "tokens": tokens.num_drafts,
                "acceptance_length_per_token": round(tokens.mean_acceptance_length, 4),
            }
            for name, steps, tokens in pairs
            if tokens.num_drafts
        }


def by_context(
    documents: Iterable[tuple[Document, Sequence[int]]], depth: int
) -> ContextAcceptance:
    """`documents`: each with the drafts [n] that are right in a row at each anchor, of `depth`."""
    counted = []
    for document, leading in documents:
        given = document.mask, leading, depth, document.limits
        parts = [*_divided(visited_steps(*given)), *_divided(all_steps(*given))]
        names = [name for name in document.groups if not name.startswith("category:")]
        counted.append((names, parts))
    groups = totals(counted, 2 * len(NAMES), SpecDecodeStats)
    return ContextAcceptance(
        {name: stats[: len(NAMES)] for name, stats in groups.items()},
        {name: stats[len(NAMES) :] for name, stats in groups.items()},
    )


def _divided(steps: Iterable[tuple[int, int, int]]) -> list[SpecDecodeStats]:
    parts = [SpecDecodeStats() for _ in NAMES]
    for newest, num_drafts, accepted in steps:
        parts[bisect_right(BOUNDS, newest + 1)].observe(num_drafts, accepted)
    return parts

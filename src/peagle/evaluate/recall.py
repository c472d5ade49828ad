"""Recall of a head's candidates, and the acceptance length of an oracle that chooses among them.

The token that the target wrote may be among the best of a depth without being the best. An oracle
that always picks it shows what the candidates are worth: where it is far ahead of the head's own
chain, the right tokens are known and the choice between them is what fails, for a draft does not
know which ones were drafted before it; where it is not, the head itself is the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.evaluate.contexts import ContextAcceptance, by_context
from peagle.evaluate.evaluator import (
    MOST_RECALLED,
    Document,
    Evaluation,
    Evaluator,
    leading,
    ranked_acceptance,
    totals,
)
from peagle.evaluate.replay import steps
from peagle.teacher_forcing.draft_model import DraftModel

BEST = (1, 4, 8, MOST_RECALLED)


@dataclass
class Recall:
    """Counts by depth, over every token of the answers at which a step may begin."""

    num_tokens: list[int] = field(default_factory=list)  # [K]
    found: dict[int, list[int]] = field(default_factory=dict)  # by M of BEST: [K]

    def merge(self, other: Recall) -> None:
        self.num_tokens = _added(self.num_tokens, other.num_tokens)
        for best, counts in other.found.items():
            self.found[best] = _added(self.found.get(best, []), counts)

    def shares(self) -> dict[int, list[float]]:
        """By M of BEST: how often the right token is among so many best ones.  # [K] each"""
        return {
            best: [x / n if n else 0.0 for x, n in zip(found, self.num_tokens, strict=True)]
            for best, found in self.found.items()
        }

    def as_dict(self) -> dict[str, Any]:
        return {str(best): [round(x, 4) for x in shares] for best, shares in self.shares().items()}


def _added(mine: Sequence[int], its: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(mine, its, strict=True)] if mine else list(its)


@dataclass(frozen=True)
class GreedyEvaluation:
    """Chains of a head on greedy text: what is accepted, and what could have been."""

    acceptance: Evaluation
    oracle: Evaluation
    recall: Mapping[str, Recall]  # by group
    by_context: ContextAcceptance  # at the largest K


def evaluate_greedy(evaluator: Evaluator, model: DraftModel) -> GreedyEvaluation:
    documents = list(evaluator.documents(model, ranked_acceptance))
    chains = [(d, leading(d.chances[0])) for d in documents]
    oracle = [(d, leading(is_recalled(d.chances[1], MOST_RECALLED))) for d in documents]
    counted = [(d.groups, [_recall(d, evaluator.max_tokens)]) for d in documents]
    return GreedyEvaluation(
        evaluator.replayed(chains),
        evaluator.replayed(oracle),
        {name: recall for name, (recall,) in totals(counted, 1, Recall).items()},
        by_context(chains, evaluator.max_tokens),
    )


def is_recalled(reciprocal_places: Tensor, best: int) -> Tensor:
    """Whether a place, counted from 1, is up to `best`; half a place is the room for rounding."""
    return reciprocal_places > 1 / (best + 0.5)


def _recall(document: Document, depth: int) -> Recall:
    left = torch.zeros(len(document.mask), dtype=torch.long)  # by anchor: tokens that are to come
    for step in steps(document.mask, depth):
        if step is not None:
            left[step.newest - 1] = step.left
    is_text = torch.arange(depth) < left[:, None]  # [n, K]
    found = {
        best: (is_recalled(document.chances[1], best) & is_text).sum(0).tolist() for best in BEST
    }
    return Recall(is_text.sum(0).tolist(), found)

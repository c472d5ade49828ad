"""Acceptance of a head for K = 1, 2, ... over groups of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar


class Acceptance(Protocol):
    """What counted and expected statistics have in common."""

    @property
    def mean_acceptance_length(self) -> float: ...

    @property
    def per_position_acceptance(self) -> list[float]: ...

    @property
    def conditional_acceptance(self) -> list[float]: ...


class Mergeable(Acceptance, Protocol):
    def merge(self, other: Self) -> None: ...


_Stats = TypeVar("_Stats", bound=Mergeable)


@dataclass(frozen=True)
class Evaluation:
    """One entry per K; groups are `all`, `not_looping` and the categories."""

    max_tokens: int
    groups: Mapping[str, Sequence[Acceptance]]
    num_documents: Mapping[str, int]

    def acceptance_length(self, num_speculative_tokens: int, group: str = "all") -> float:
        k = min(num_speculative_tokens, self.max_tokens)
        return self.groups[group][k - 1].mean_acceptance_length

    def as_dict(self) -> dict[str, Any]:
        return {name: self._group(name) for name in self.groups}

    def _group(self, name: str) -> dict[str, Any]:
        stats = self.groups[name]
        return {
            "documents": self.num_documents[name],
            "acceptance_length": [round(s.mean_acceptance_length, 4) for s in stats],
            "per_position_acceptance": [round(x, 4) for x in stats[-1].per_position_acceptance],
            "conditional_acceptance": [round(x, 4) for x in stats[-1].conditional_acceptance],
        }


def summed(
    documents: Iterable[tuple[Sequence[str], Sequence[_Stats]]],
    max_tokens: int,
    zero: Callable[[], _Stats],
) -> Evaluation:
    """Adds up documents, each with the groups it belongs to and its statistics for every K."""
    groups: dict[str, list[_Stats]] = {"all": [zero() for _ in range(max_tokens)]}
    counts: dict[str, int] = {"all": 0}
    for names, stats in documents:
        for name in names:
            totals = groups.setdefault(name, [zero() for _ in range(max_tokens)])
            for total, one in zip(totals, stats, strict=True):
                total.merge(one)
            counts[name] = counts.get(name, 0) + 1
    return Evaluation(max_tokens, groups, counts)

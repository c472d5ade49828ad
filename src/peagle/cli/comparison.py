"""Figures of several methods on the same prompts: speed, acceptance, and whether tokens agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from peagle.cli.render import rate
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

COLUMNS = (
    "method",
    "K",
    "tokens/s",
    "speed-up",
    "mean acceptance length",
    "without looping",
    "steps that drafted",
    "same output",
)


@dataclass
class Contender:
    """One method, its engine and what it has done so far: one entry per prompt."""

    name: str
    llm: LLM
    num_speculative_tokens: int | None
    answers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: list[SpecDecodeStats] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def tokens_per_second(self) -> float:
        return rate(self.num_tokens, sum(self.seconds))

    @property
    def looping(self) -> list[bool]:
        return [is_looping(answer) for answer in self.answers]

    def total(self, *, with_looping: bool = True) -> SpecDecodeStats:
        total = SpecDecodeStats()
        for stats, loops in zip(self.stats, self.looping, strict=True):
            if with_looping or not loops:
                total.merge(stats)
        return total


class Difference(NamedTuple):
    """Where a method first left the plain target's answer; None: the answer had ended."""

    method: str
    prompt: int  # counted from 1, as is the token
    token: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return (
            f"{self.method}: prompt {self.prompt}, token {self.token}: "
            f"plain has {_named(self.expected)}, {self.method} has {_named(self.got)}"
        )


def find_differences(plain: Contender, other: Contender) -> list[Difference]:
    """The first difference of each answer; empty if all tokens are the same."""
    found = []
    for number, (ours, theirs) in enumerate(zip(plain.answers, other.answers, strict=True), 1):
        if ours != theirs:
            at = _first_difference(ours, theirs)
            found.append(Difference(other.name, number, at + 1, _at(ours, at), _at(theirs, at)))
    return found


def record(plain: Contender, other: Contender) -> dict[str, Any]:
    """One method's figures, ready for JSON."""
    total, steady = other.total(), other.total(with_looping=False)
    return {
        "method": other.name,
        "num_speculative_tokens": other.num_speculative_tokens,
        "num_output_tokens": other.num_tokens,
        "seconds": sum(other.seconds),
        "tokens_per_second": other.tokens_per_second,
        "speedup": rate(1, plain.tokens_per_second) * other.tokens_per_second,
        "mean_acceptance_length": total.mean_acceptance_length if total.num_drafts else None,
        "mean_acceptance_length_without_looping": (
            steady.mean_acceptance_length if steady.num_drafts else None
        ),
        "looping_answers": sum(other.looping),
        "share_of_steps_that_drafted": rate(total.num_drafts, total.num_steps),
        "same_output": not find_differences(plain, other),
        "stats": total.as_dict(),
    }


def table_row(figures: dict[str, Any]) -> list[str]:
    """The columns of COLUMNS."""
    k = figures["num_speculative_tokens"]
    return [
        figures["method"],
        str(k) if k else "-",
        f"{figures['tokens_per_second']:.1f}",
        f"{figures['speedup']:.2f}x",
        _length(figures["mean_acceptance_length"]),
        _length(figures["mean_acceptance_length_without_looping"]),
        f"{figures['share_of_steps_that_drafted']:.0%}" if k else "-",
        "yes" if figures["same_output"] else "NO",
    ]


def _length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _first_difference(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _at(tokens: list[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _named(token_id: int | None) -> str:
    return "the end" if token_id is None else f"id {token_id}"

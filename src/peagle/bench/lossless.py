"""Are the answers those of the plain target? Compared while measuring, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.bench.calls import Record
from peagle.bench.gaps import GapQuery
from peagle.bench.results import Difference

MOST_NAMED = 10  # differences of one run; each costs an extra request for its gap
GapsOf = Callable[[Sequence[GapQuery]], list[float | None]]
AnswerKey = tuple[str, int]  # prompt's id and turn


@dataclass(frozen=True)
class Compared:
    """One run against the reference."""

    compared: int = 0
    different: int = 0
    not_comparable: int = 0
    differences: list[Difference] = field(default_factory=list)  # the first of them


def answers_of(records: Sequence[Record]) -> dict[AnswerKey, list[int]]:
    """Answered turns that have token ids. Of a prompt asked again the first time counts."""
    found: dict[AnswerKey, list[int]] = {}
    for record in records:
        answer = record.answer
        if answer is not None and answer.error is None and answer.token_ids is not None:
            key = (record.call.task.source_id, record.call.turn)
            found.setdefault(key, answer.token_ids)
    return found


def compare(
    records: Sequence[Record],
    reference: dict[AnswerKey, list[int]],
    about: Difference,
    *,
    gaps_of: GapsOf | None = None,
    tokenizer: Any = None,
) -> Compared:
    """`about` names the run; its place and tokens are filled in for each difference.

    Turns behind a turn that differed had another prompt, so they are not compared.
    """
    num_compared = num_not_comparable = 0
    found: list[Difference] = []
    places: list[tuple[Record, Sequence[int], int]] = []
    left: set[str] = set()  # conversations that went another way
    for record in sorted(records, key=lambda r: r.call.turn):
        answer = record.answer
        expected = reference.get((record.call.task.source_id, record.call.turn))
        if answer is None or answer.error or answer.token_ids is None or expected is None:
            continue
        if record.call.task.id in left:
            num_not_comparable += 1
            continue
        num_compared += 1
        at = first_difference(expected, answer.token_ids)
        if at is not None:
            left.add(record.call.task.id)
            if len(found) < MOST_NAMED:
                found.append(_difference(about, record, expected, at, tokenizer))
                places.append((record, expected, at))
    if gaps_of is not None:
        found = _with_gaps(found, [_query(*place) for place in places], gaps_of)
    return Compared(num_compared, len(left), num_not_comparable, found)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for at, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _difference(
    about: Difference,
    record: Record,
    expected: Sequence[int],
    at: int,
    tokenizer: Any,
) -> Difference:
    wanted, seen = _at(expected, at), _at(_token_ids(record), at)
    return replace(
        about,
        prompt=record.call.task.id,
        turn=record.call.turn,
        position=at,
        expected=wanted,
        got=seen,
        expected_text=_text(tokenizer, wanted),
        got_text=_text(tokenizer, seen),
    )


def _query(record: Record, expected: Sequence[int], at: int) -> GapQuery | None:
    """None where one of the answers had ended."""
    wanted, seen = _at(expected, at), _at(_token_ids(record), at)
    if wanted is None or seen is None:
        return None
    return GapQuery((*record.call.prompt.token_ids, *expected[:at]), wanted, seen)


def _with_gaps(
    found: Sequence[Difference], queries: Sequence[GapQuery | None], gaps_of: GapsOf
) -> list[Difference]:
    asked = [query for query in queries if query is not None]
    gaps = dict(zip(asked, gaps_of(asked), strict=True)) if asked else {}
    pairs = zip(found, queries, strict=True)
    return [replace(d, gap=gaps[query]) if query is not None else d for d, query in pairs]


def _token_ids(record: Record) -> list[int]:
    assert record.answer is not None
    assert record.answer.token_ids is not None
    return record.answer.token_ids


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text(tokenizer: Any, token: int | None) -> str:
    return "" if tokenizer is None or token is None else str(tokenizer.decode([token]))

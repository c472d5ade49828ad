"""Are the answers those of the plain target? Compared while measuring, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.backends.contract import Backend
from peagle.bench.calls import Record
from peagle.bench.results import Difference
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

MOST_NAMED = 20  # differences of one run; each costs an extra request for its gap
# prompt's token ids and the answer so far, expected, got -> the gap
GapOf = Callable[[Sequence[int], int, int], float | None]
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
    gap_of: GapOf | None = None,
    tokenizer: Any = None,
) -> Compared:
    """`about` names the run; its place and tokens are filled in for each difference.

    Turns behind a turn that differed had another prompt, so they are not compared.
    """
    num_compared = num_not_comparable = 0
    found: list[Difference] = []
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
                found.append(_difference(about, record, expected, at, gap_of, tokenizer))
    return Compared(num_compared, len(left), num_not_comparable, found)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for at, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def logprob_gap(
    backend: Backend, num_logprobs: int, prefix: Sequence[int], expected: int, got: int
) -> float | None:
    """log p(expected) - log p(got) after `prefix`, by the target without drafts. None where one
    of them is not among the `num_logprobs` best."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=num_logprobs, num_speculative_tokens=0
    )
    try:
        answer = backend.generate({"prompt_token_ids": list(prefix)}, params)[0].outputs[0]
    except RequestError:
        return None  # the context was full
    if not answer.logprobs:
        return None
    row = answer.logprobs[0]
    if expected not in row or got not in row:
        return None
    return row[expected].logprob - row[got].logprob


def _difference(
    about: Difference,
    record: Record,
    expected: Sequence[int],
    at: int,
    gap_of: GapOf | None,
    tokenizer: Any,
) -> Difference:
    assert record.answer is not None
    assert record.answer.token_ids is not None
    got = record.answer.token_ids
    wanted, seen = _at(expected, at), _at(got, at)
    gap = None
    if gap_of is not None and wanted is not None and seen is not None:
        gap = gap_of([*record.call.prompt.token_ids, *got[:at]], wanted, seen)
    return replace(
        about,
        prompt=record.call.task.id,
        turn=record.call.turn,
        position=at,
        expected=wanted,
        got=seen,
        gap=gap,
        expected_text=_text(tokenizer, wanted),
        got_text=_text(tokenizer, seen),
    )


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text(tokenizer: Any, token: int | None) -> str:
    return "" if tokenizer is None or token is None else str(tokenizer.decode([token]))

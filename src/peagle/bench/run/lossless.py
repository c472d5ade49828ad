"""Whether the answers are those of the plain target: compared while measuring, token by token.

Where two answers part, the gap says how near a tie the two tokens were: the difference of their
log-probabilities after the common prefix, by the plain target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from peagle.backends.contract import Backend
from peagle.bench.results.document import AnswerDifference
from peagle.bench.results.store import AnswerKey
from peagle.bench.run.client import Record
from peagle.errors import RequestError
from peagle.sampling_params import MAX_LOGPROBS, SamplingParams

MOST_NAMED = 10  # differences of one run; each costs an extra request for its gap
FEW_LOGPROBS = 16  # the tokens of a near tie are among them; more take long to write down


class GapQuery(NamedTuple):
    prefix: tuple[int, ...]  # prompt and the common part of the answer
    expected: int
    got: int


GapsOf = Callable[[Sequence[GapQuery]], list[float | None]]


@dataclass(frozen=True)
class RunComparison:
    """One run against the reference."""

    compared: int = 0
    different: int = 0
    not_comparable: int = 0
    differences: list[AnswerDifference] = field(default_factory=list)  # the first of them


def answers_of(records: Sequence[Record]) -> dict[AnswerKey, list[int]]:
    """Answered turns that have token ids. A prompt that was asked again counts once, the first."""
    found: dict[AnswerKey, list[int]] = {}
    for record in records:
        answer = record.answer
        if answer is not None and answer.error is None and answer.token_ids is not None:
            key = (record.call.task.source_id, record.call.turn)
            found.setdefault(key, answer.token_ids)
    return found


def compare_answers(
    records: Sequence[Record],
    reference: dict[AnswerKey, list[int]],
    about: AnswerDifference,
    *,
    gaps_of: GapsOf | None = None,
    tokenizer: Any = None,
) -> RunComparison:
    """`about` names the run; its place and tokens are filled in for each difference.

    Turns behind a turn that differed had another prompt, so they are not compared.
    """
    num_compared = num_not_comparable = 0
    found: list[AnswerDifference] = []
    places: list[tuple[Record, Sequence[int], int]] = []
    left: set[str] = set()  # conversations that differed
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
    return RunComparison(num_compared, len(left), num_not_comparable, found)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    for at, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        if ours != theirs:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def _difference(
    about: AnswerDifference,
    record: Record,
    expected: Sequence[int],
    at: int,
    tokenizer: Any,
) -> AnswerDifference:
    wanted, seen = token_at(expected, at), token_at(_token_ids(record), at)
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
    wanted, seen = token_at(expected, at), token_at(_token_ids(record), at)
    if wanted is None or seen is None:
        return None
    return GapQuery((*record.call.prompt.token_ids, *expected[:at]), wanted, seen)


def _with_gaps(
    found: Sequence[AnswerDifference], queries: Sequence[GapQuery | None], gaps_of: GapsOf
) -> list[AnswerDifference]:
    asked = [query for query in queries if query is not None]
    gaps = dict(zip(asked, gaps_of(asked), strict=True)) if asked else {}
    pairs = zip(found, queries, strict=True)
    return [replace(d, gap=gaps[query]) if query is not None else d for d, query in pairs]


def _token_ids(record: Record) -> list[int]:
    assert record.answer is not None
    assert record.answer.token_ids is not None
    return record.answer.token_ids


def token_at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text(tokenizer: Any, token: int | None) -> str:
    return "" if tokenizer is None or token is None else str(tokenizer.decode([token]))


class KnownGaps:
    """Asks for each gap once: repeats of a cell differ at the same places."""

    def __init__(self, vocab_size: int) -> None:
        self.most_logprobs = min(MAX_LOGPROBS, vocab_size)
        self._known: dict[GapQuery, float | None] = {}

    def of(self, backend: Backend, queries: Sequence[GapQuery]) -> list[float | None]:
        new = list(dict.fromkeys(query for query in queries if query not in self._known))
        self._known |= zip(new, logprob_gaps(backend, new, self.most_logprobs), strict=True)
        return [self._known[query] for query in queries]


def logprob_gaps(
    backend: Backend, queries: Sequence[GapQuery], most_logprobs: int
) -> list[float | None]:
    """log p(expected) - log p(got), all queries at once. None where the context was full, or
    where one of the two is not among the `most_logprobs` best."""
    found = dict[GapQuery, float | None]()
    for count in (FEW_LOGPROBS, most_logprobs):
        left = [query for query in queries if found.get(query) is None]
        found |= _gaps_among(backend, left, min(count, most_logprobs))
    return [found[query] for query in queries]


def _gaps_among(
    backend: Backend, queries: Sequence[GapQuery], num_logprobs: int
) -> dict[GapQuery, float | None]:
    params = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=num_logprobs, num_speculative_tokens=0
    )
    found = dict.fromkeys(queries, None) | dict[GapQuery, float | None]()
    fitting = [query for query in queries if _fits(backend, query, params)]
    prompts = [{"prompt_token_ids": list(query.prefix)} for query in fitting]
    for query, output in zip(fitting, backend.generate(prompts, params), strict=True):
        rows = output.outputs[0].logprobs
        if rows and query.expected in rows[0] and query.got in rows[0]:
            found[query] = rows[0][query.expected].logprob - rows[0][query.got].logprob
    return found


def _fits(backend: Backend, query: GapQuery, params: SamplingParams) -> bool:
    try:
        backend.check_request({"prompt_token_ids": list(query.prefix)}, params)
    except RequestError:
        return False
    return True

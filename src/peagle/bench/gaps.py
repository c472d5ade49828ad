"""How near a tie was: the log-probabilities of two tokens after a prefix, by the plain target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peagle.backends.contract import Backend
from peagle.errors import RequestError
from peagle.sampling_params import MAX_LOGPROBS, SamplingParams

FEW_LOGPROBS = 16  # the tokens of a near tie are among them; more take long to write down


class GapQuery(NamedTuple):
    prefix: tuple[int, ...]  # prompt and the common part of the answer
    expected: int
    got: int


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

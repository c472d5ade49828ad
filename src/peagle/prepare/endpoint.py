"""Answers from an OpenAI-compatible endpoint, as token ids: vLLM at scale.

Prompts go as token ids, so no second tokenizer or template can disagree with ours, and
`return_token_ids` brings the generated ids back: text is never matched or tokenized again.
"""

from __future__ import annotations

import json
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from peagle.errors import DataError
from peagle.http import Endpoint, HttpClient, RefusedError, ServerError, retrying
from peagle.prepare.answers import Question, TargetAnswer
from peagle.sampling_params import SamplingParams

PATH = "/v1/completions"
NO_IDS = "vLLM 0.10.2 or newer returns token ids (return_token_ids)"


class EndpointAnswers:
    def __init__(self, endpoint: Endpoint, params: SamplingParams, concurrency: int) -> None:
        self.endpoint, self.params, self.capacity = endpoint, params, concurrency
        self._http = HttpClient(endpoint)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="endpoint")
        self._asked: dict[Future[TargetAnswer], Question] = {}

    def submit(self, question: Question) -> None:
        self._asked[self._pool.submit(self._ask, question)] = question

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        finished = wait(self._asked, return_when=FIRST_COMPLETED).done
        return [(self._asked.pop(future), future.result()) for future in finished]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, question: Question) -> TargetAnswer:
        """A question that the endpoint refuses is an answer with an error; an endpoint that
        cannot be reached ends the run, or a broken network would fail every row."""
        try:
            content = retrying(lambda: self._http.post(PATH, self._body(question)), self.endpoint)
        except ServerError as error:
            if isinstance(error, RefusedError) and not (error.is_fatal or error.is_temporary):
                return TargetAnswer([], error=str(error))
            raise self._gone(error) from None
        return read_answer(content)

    def _gone(self, reason: ServerError) -> DataError:
        return DataError(
            f"{self.endpoint.base_url}{PATH} returns no answers: {reason}",
            hint="check --endpoint and --endpoint-model; run the same command again to continue",
        )

    def _body(self, question: Question) -> dict[str, Any]:
        params = self.params
        body = {
            "model": self.endpoint.model,
            "prompt": question.prompt_token_ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": question.seed % 2**31,
            "return_token_ids": True,
        }
        return body | ({"top_k": params.top_k} if params.top_k > 0 else {})


def read_answer(content: bytes) -> TargetAnswer:
    try:
        choice = json.loads(content)["choices"][0]
        token_ids = choice.get("token_ids")
    except (ValueError, LookupError, TypeError, AttributeError):
        return TargetAnswer([], error=f"the endpoint sent no completion: {content[:80]!r}")
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise DataError("the endpoint's answers have no token_ids", hint=NO_IDS)
    if not token_ids:
        return TargetAnswer([], error="the endpoint's answer is empty")
    return TargetAnswer(token_ids, clipped=choice.get("finish_reason") == "length")

"""Answers from an OpenAI-compatible endpoint, as token ids: vLLM at scale.

Prompts go as token ids, so no second tokenizer or template can disagree with ours, and
`return_token_ids` brings the generated ids back: text is never matched or tokenized again.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from peagle.errors import ConfigError, DataError
from peagle.prepare.answers import Question, TargetAnswer
from peagle.sampling_params import SamplingParams

NO_USE_TRYING_AGAIN = (401, 403, 404, 405)  # the same for every question
NO_IDS = "vLLM 0.10.2 or newer returns token ids (return_token_ids)"


@dataclass(frozen=True)
class Endpoint:
    url: str  # with or without /v1
    model: str
    api_key: str | None = None
    retries: int = 5
    timeout: float = 600.0  # seconds for one answer
    first_wait: float = 1.0  # seconds before the first retry; doubled each time

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(
                f"endpoint {self.url!r} is not an address", hint="write http://HOST:PORT"
            )

    @property
    def completions_url(self) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/completions"


class EndpointAnswers:
    def __init__(self, endpoint: Endpoint, params: SamplingParams, concurrency: int) -> None:
        self.endpoint, self.params, self.capacity = endpoint, params, concurrency
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
        pause = self.endpoint.first_wait
        for attempt in range(self.endpoint.retries + 1):
            try:
                return read_answer(self._post(question))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {_message(error)}"
                if error.code in NO_USE_TRYING_AGAIN:
                    raise self._gone(reason) from None
                if error.code < 500 and error.code != 429:
                    return TargetAnswer([], error=reason)
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", "") or error) or type(error).__name__
            if attempt < self.endpoint.retries:
                time.sleep(pause)
                pause *= 2
        raise self._gone(reason)

    def _gone(self, reason: str) -> DataError:
        return DataError(
            f"{self.endpoint.completions_url} gives no answers: {reason}",
            hint="check --endpoint and --endpoint-model; the same command goes on where this ended",
        )

    def _post(self, question: Question) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.endpoint.api_key:
            headers["Authorization"] = f"Bearer {self.endpoint.api_key}"
        body = json.dumps(self._body(question)).encode()
        request = urllib.request.Request(self.endpoint.completions_url, body, headers)
        with urllib.request.urlopen(request, timeout=self.endpoint.timeout) as response:
            content: bytes = response.read()
            return content

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
        raise DataError("the endpoint's answers carry no token_ids", hint=NO_IDS)
    if not token_ids:
        return TargetAnswer([], error="the endpoint's answer is empty")
    return TargetAnswer(token_ids, clipped=choice.get("finish_reason") == "length")


def _message(error: urllib.error.HTTPError) -> str:
    """The `message` of an OpenAI error, or the start of whatever came."""
    content = error.read()[:2000]
    try:
        document = json.loads(content)
        return str(document.get("error", document).get("message", document))[:200]
    except (ValueError, AttributeError):
        return content.decode("utf-8", "replace")[:200]

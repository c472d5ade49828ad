"""Drives an OpenAI-compatible server: one thread per open request, times taken as chunks come."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from peagle.bench.run.client import Call, ClientAnswer, Update
from peagle.bench.workloads.prompter import messages, random_tokens, raw_text
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError, ConfigError
from peagle.http import Endpoint, HttpClient, RefusedError, ServerError

HINT = "is the server up? the same command goes on where this ended"
KNOWS_TOKEN_IDS = ("vllm", "peagle")  # `owned_by` of servers that take vLLM's own keys


def find_model(endpoint: Endpoint, wanted: str) -> Endpoint:
    """The endpoint with the name of its model: `wanted` if it serves that, or its only one."""
    try:
        with HttpClient(endpoint) as http:
            listed = json.loads(http.get("/v1/models"))["data"]
        owners = {str(entry["id"]): entry.get("owned_by") for entry in listed}
    except ServerError as error:
        raise BackendError(f"{endpoint.url} gives no answer: {error}", hint=HINT) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BackendError(
            f"{endpoint.url} is not an OpenAI-compatible server: /v1/models lists no model",
            hint="give the address without a path, or with /v1",
        ) from None
    name = wanted if wanted in owners else next(iter(owners), "")
    if not owners or (name != wanted and len(owners) > 1):
        raise BackendError(
            f"{endpoint.url} does not serve {wanted!r}",
            hint=f"give MODEL as the server names it: {', '.join(owners) or 'it serves none'}",
        )
    return replace(endpoint, model=name, shows_token_ids=owners[name] in KNOWS_TOKEN_IDS)


class EventSource(Protocol):
    """Where answers come from as documents of a stream: see HttpClient."""

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]: ...


class EndpointClient:
    """`source` None: the endpoint itself, by HTTP."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        source: EventSource | None = None,
        raw: bool = False,
        seed: int = 0,
        tokenizer: Any = None,
    ) -> None:
        self.endpoint, self.raw, self.seed, self.tokenizer = endpoint, raw, seed, tokenizer
        self._source = source or HttpClient(endpoint)
        self._news: queue.SimpleQueue[Update | BackendError] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def prompt(self, task: Task, answers: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """The path, and the key of the body that holds the prompt."""
        if task.num_random_tokens:
            if self.tokenizer is None:
                raise ConfigError(
                    "random tokens need the model's vocabulary",
                    hint="give MODEL as a folder or id that is readable here too",
                )
            ids = random_tokens(self.tokenizer, task, self.seed)
            return "/v1/completions", {"prompt": ids}
        if self.raw:
            return "/v1/completions", {"prompt": raw_text(task, answers)}
        return "/v1/chat/completions", {"messages": messages(task, answers)}

    def start(self, call: Call) -> None:
        if call.prompt is None:
            call.prompt = self.prompt(call.task, call.answers)
        # A daemon: a server that hangs must not keep the process from ending.
        threading.Thread(target=self._answer, args=(call,), daemon=True).start()

    def wait(self, timeout: float | None) -> list[Update]:
        try:
            news = [self._news.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._news.empty():
            news.append(self._news.get())
        failure = next((n for n in news if isinstance(n, BackendError)), None)
        if failure is not None:
            raise failure
        return [update for update in news if isinstance(update, Update)]

    def cancel(self) -> None:
        """Threads end with their next chunk; the client is of no use afterwards."""
        self._cancelled.set()

    def _answer(self, call: Call) -> None:
        try:
            self._stream(call)
        except RefusedError as error:
            if error.is_fatal:
                self._news.put(self._gone(error))
            else:
                self._end(
                    call, 0, ClientAnswer("", 0, error=str(error), refused=error.is_wrong_request)
                )
        except Exception as error:  # a thread's error would vanish and the harness wait for ever
            self._news.put(self._gone(error))

    def _stream(self, call: Call) -> None:
        path, prompt = call.prompt
        growing = GrowingAnswer()
        body = prompt | self._options(call)
        with contextlib.closing(self._source.events(path, body)) as documents:
            for document in documents:
                if growing.take(document):
                    self._news.put(Update(call, time.perf_counter(), growing.num_tokens))
                if self._cancelled.is_set():
                    break
        self._end(call, growing.num_tokens, growing.answer())

    def _end(self, call: Call, num_shown: int, answer: ClientAnswer) -> None:
        self._news.put(Update(call, time.perf_counter(), num_shown, answer))

    def _options(self, call: Call) -> dict[str, Any]:
        params = call.params
        options: dict[str, Any] = {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint.model:
            options["model"] = self.endpoint.model
        if params.seed is not None:
            options["seed"] = params.seed % 2**31
        if self.endpoint.shows_token_ids:
            options |= {"return_token_ids": True, "ignore_eos": params.ignore_eos}
        return options

    def _gone(self, error: BaseException) -> BackendError:
        return BackendError(
            f"{self.endpoint.url} gives no answer: {str(error) or type(error).__name__}", hint=HINT
        )


@dataclass
class GrowingAnswer:
    """An answer while its chunks come. A server without token ids is taken to send one token a
    chunk until its `usage` says how many there were."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    usage: int | None = None

    def take(self, document: dict[str, Any]) -> bool:
        """True if the chunk brought a token."""
        usage = document.get("usage")
        if usage:
            self.usage = int(usage["completion_tokens"])
        if not document.get("choices"):
            return False
        choice = document["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids") or []
        self.text.append(text)
        self.token_ids += ids
        self.num_tokens += len(ids) or bool(text)
        return bool(ids or text)

    def answer(self) -> ClientAnswer:
        num_tokens = self.num_tokens if self.usage is None else self.usage
        ids = self.token_ids if len(self.token_ids) == num_tokens else None
        error = None if num_tokens else "the answer is empty"
        return ClientAnswer("".join(self.text), num_tokens, ids, error=error)

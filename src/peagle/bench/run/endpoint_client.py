"""Drives an OpenAI-compatible server: one thread per open request, times taken as chunks come."""

from __future__ import annotations

import http.client
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.bench.run.client import Call, ClientAnswer, Update
from peagle.bench.run.endpoint import HINT, Endpoint, RefusedError, events, reason
from peagle.bench.workloads.prompter import messages, random_tokens, raw_text
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError, ConfigError


class EndpointClient:
    def __init__(
        self, endpoint: Endpoint, *, raw: bool = False, seed: int = 0, tokenizer: Any = None
    ) -> None:
        self.endpoint, self.raw, self.seed, self.tokenizer = endpoint, raw, seed, tokenizer
        self._idle: list[http.client.HTTPConnection] = []  # kept between requests
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
            if error.fatal:
                self._news.put(self._gone(error))
            else:
                self._end(
                    call, 0, ClientAnswer("", 0, error=str(error), refused=error.wrong_request)
                )
        except Exception as error:  # a thread's error would vanish and the harness wait for ever
            self._news.put(self._gone(error))

    def _stream(self, call: Call) -> None:
        path, prompt = call.prompt
        body = prompt | self._options(call)
        growing = GrowingAnswer()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.endpoint.connect()
        try:
            self._read(connection, call, path, body, growing)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if growing.num_tokens:
                raise
            # The server may have closed a kept connection while it was idle: try a fresh one.
            connection = self.endpoint.connect()
            self._read(connection, call, path, body, growing)
        self._idle.append(connection)
        self._end(call, growing.num_tokens, growing.answer())

    def _read(
        self,
        connection: http.client.HTTPConnection,
        call: Call,
        path: str,
        body: dict[str, Any],
        growing: GrowingAnswer,
    ) -> None:
        try:
            for document in events(connection, self.endpoint, path, body):
                if growing.take(document):
                    self._news.put(Update(call, time.perf_counter(), growing.num_tokens))
                if self._cancelled.is_set():
                    break
        except BaseException:
            connection.close()
            raise

    def _end(self, call: Call, num_shown: int, answer: ClientAnswer) -> None:
        self._news.put(Update(call, time.perf_counter(), num_shown, answer))

    def _options(self, call: Call) -> dict[str, Any]:
        params = call.params
        options: dict[str, Any] = {
            "model": self.endpoint.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.seed is not None:
            options["seed"] = params.seed % 2**31
        if self.endpoint.shows_token_ids:
            options |= {"return_token_ids": True, "ignore_eos": params.ignore_eos}
        return options

    def _gone(self, error: BaseException) -> BackendError:
        return BackendError(f"{self.endpoint.url} gives no answer: {reason(error)}", hint=HINT)


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

"""Open requests of many clients, for one event loop: an API server's side of the engine's loop.

Everything here runs in the event loop's thread, but for sending long commands: one may fill the
connection's buffer, and the loop has to read meanwhile, or both sides would wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import queue
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple, Protocol

from peagle.engine.detokenizer import Detokenizer, Tokenizer
from peagle.engine.prompts import TokenizedPrompt
from peagle.outputs import FinishReason
from peagle.sampling_params import SamplingParams
from peagle.server.engine_loop import (
    Abort,
    AnswerNews,
    AskStatus,
    EngineStatus,
    Failed,
    Growth,
    Ready,
    Refused,
    Report,
    RequestNews,
    Submit,
    num_unread,
)
from peagle.server.errors import ApiError
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.engine.request import DraftTree, TokenLogprobs

MAX_DIRECT_BYTES = 1 << 16  # unread commands that surely fit into the connection's buffer
JOIN_SECONDS = 2.0
STATUS_SECONDS = 2.0  # for the engine to say how it is; a step is shorter
GONE = Failed("the engine's process has ended")


class Delta(NamedTuple):
    """What one answer got since it was last asked for."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    drafts: list[Piece] | None  # the text in pieces, where the request asks for them
    trees: list[DraftTree] | None = None  # of its steps, likewise


class Piece(NamedTuple):
    """Text that accepted drafts gave, or the target itself. A character of several tokens belongs
    to the last of them."""

    text: str
    drafted: bool


@dataclass(eq=False)
class GrowingText:
    """The text of one answer: what no later token can take back, and at its end all of it."""

    detokenizer: Detokenizer
    num_shown: int = 0  # characters

    def add(self, news: AnswerNews) -> str:
        """-> the text that became certain. A stop string is found at the same token as by the
        engine, which looks for it in the same way."""
        self.detokenizer.extend(self._with_text(news))
        return self._fresh(ended=news.finish_reason is not None)

    def pieces(self, news: AnswerNews) -> list[Piece]:
        """The same in pieces: a step's tokens are drafts up to the last, which is the target's."""
        token_ids, pieces = self._with_text(news), []
        own = set(itertools.accumulate(news.tokens_per_step))
        for count, token in enumerate(token_ids, start=1):
            self.detokenizer.append(token)
            pieces.append(Piece(self._fresh(ended=False), count not in own))
        if news.finish_reason is not None:
            pieces.append(Piece(self._fresh(ended=True), drafted=False))
        return [piece for piece in pieces if piece.text]

    def _with_text(self, news: AnswerNews) -> list[int]:
        """A token that ends the answer adds no text unless stops are included."""
        by_token = news.finish_reason == "stop" and not isinstance(news.stop_reason, str)
        drops_last = by_token and not self.detokenizer.include_stop
        return news.token_ids[:-1] if drops_last else news.token_ids

    def _fresh(self, *, ended: bool) -> str:
        if ended:
            self.detokenizer.finish()
        text = self.detokenizer.text if ended else self.detokenizer.stable_text
        fresh = text[self.num_shown :]
        self.num_shown = max(self.num_shown, len(text))
        return fresh


@dataclass(eq=False)
class Generation:
    """The answers to one HTTP request: one or more prompts, each with n answers."""

    params: SamplingParams
    prompts: Sequence[TokenizedPrompt]
    texts: list[GrowingText]  # of choice i: answer i % n to prompt i // n
    cancel: Callable[[Generation], None]
    shows_drafts: bool = False
    shows_trees: bool = False
    arrived: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of prompts whose answers are finished
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    keys: list[int] = field(default_factory=list)  # of its prompts, in their order
    num_unfinished: int = 0  # prompts
    error: ApiError | None = None
    timer: asyncio.TimerHandle | None = None
    _news: list[tuple[int, AnswerNews]] = field(default_factory=list)  # with the prompt's number
    _waiter: asyncio.Future[None] | None = None  # of the one that waits for news

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def finished(self) -> bool:
        return not self.num_unfinished and not self._news

    async def next(self) -> list[Delta]:
        """Waits for news; nothing once all answers are finished. Raises ApiError."""
        while not self._news and self.num_unfinished and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.error is not None:
            raise self.error
        news, self._news = self._news, []
        return [self._delta(number, one) for number, one in news]

    def close(self) -> None:
        """Gives up what is not finished. May be called twice."""
        self.cancel(self)

    def grow(self, number: int, growth: Growth) -> None:
        _, answer, token_ids, tokens_per_step = growth
        news = AnswerNews(answer, token_ids, [], tokens_per_step, None, None, None)
        self._news.append((number, news))
        self.num_output_tokens += len(token_ids)
        self._wake()

    def take(self, number: int, news: RequestNews) -> None:
        for one in news.answers:
            self._news.append((number, one))
            self.num_output_tokens += len(one.token_ids)
        if news.stats is not None:
            self.stats.merge(news.stats)
            self.num_cached_tokens += news.num_cached_tokens
            self.num_preemptions += news.num_preemptions
            self.num_unfinished -= 1
        self._wake()

    def fail(self, error: ApiError) -> None:
        """The first error is the one that counts."""
        self.error = self.error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _delta(self, number: int, news: AnswerNews) -> Delta:
        if news.error is not None:
            raise ApiError(500, news.error)
        choice = number * self.params.n + news.number
        pieces = self.texts[choice].pieces(news) if self.shows_drafts else None
        text = self.texts[choice].add(news) if pieces is None else "".join(p.text for p in pieces)
        return Delta(
            choice,
            text,
            news.token_ids,
            news.logprobs,
            news.finish_reason,
            news.stop_reason,
            pieces,
            news.trees,
        )


class Observer(Protocol):
    """Hears of a report once, and of what each request got in it."""

    def count(self, num_tokens: int) -> None: ...

    def tokens(self, generation: Generation, now: float) -> None: ...

    def end(self, generation: Generation, news: RequestNews, now: float) -> None: ...


@dataclass(eq=False)
class OpenAnswers:
    """How many answers the API servers have open, in memory that they share. Each writes only
    its own number: no lock that one could die with."""

    counts: MutableSequence[int]
    own: int = 0  # the number of this API server

    def add(self, count: int, most: int) -> bool:
        """False, and nothing is added, where there would be more than `most` in all. Adds first:
        of two that come at once at least one sees the other."""
        self.counts[self.own] += count
        if self.total <= most:
            return True
        self.counts[self.own] -= count
        return False

    def remove(self, count: int) -> None:
        self.counts[self.own] -= count

    @property
    def total(self) -> int:
        return sum(self.counts)


class AsyncLLM:
    """`max_waiting`: answers that may be open beside those that the engine runs at once."""

    def __init__(
        self,
        connection: Connection,
        decoder: Tokenizer,
        *,
        max_waiting: int,
        timeout: float,
        observer: Observer,
        answers: OpenAnswers | None = None,
    ) -> None:
        self._connection, self._decoder = connection, decoder
        self._max_waiting, self._timeout, self._observer = max_waiting, timeout, observer
        self._keys = itertools.count()
        self._open: dict[int, tuple[Generation, int]] = {}  # with the prompt's number
        self._answers = answers or OpenAnswers([0])
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_to_send = 0
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._changed = asyncio.Event()
        self.ready: Ready | None = None
        self.failure: Failed | None = None
        self.status = EngineStatus(0, 0, 0, 0, 0, SpecDecodeStats())
        self._status_waiters: list[asyncio.Future[None]] = []

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sender.start()
        self._loop.add_reader(self._connection.fileno(), self._read)

    def close(self) -> None:
        """Ends the engine's loop. Requests that are open fail."""
        if self.failure is None:
            self._fail(Failed("the server is shutting down"))
        self._to_send.put(None)
        self._sender.join(JOIN_SECONDS)  # an engine that hangs reads no more
        self._connection.close()

    def check_ready(self) -> None:
        """Raises ApiError where no request can be served now."""
        if self.failure is not None:
            raise ApiError(503, "the engine has stopped")
        if self.ready is None:
            raise ApiError(503, "the model is loading", headers={"Retry-After": "5"})

    async def wait_until_ready(self) -> Ready:
        """Raises ApiError where the engine fails before."""
        while self.ready is None:
            if self.failure is not None:
                raise ApiError(503, "the engine has stopped")
            self._changed.clear()
            await self._changed.wait()
        return self.ready

    async def wait_for_failure(self) -> Failed:
        while self.failure is None:
            self._changed.clear()
            await self._changed.wait()
        return self.failure

    @property
    def num_open(self) -> int:
        """Answers, running or waiting, of all API servers."""
        return self._answers.total

    async def renew_status(self) -> None:
        """Asks the engine. One that does not answer leaves what it said last."""
        if self.ready is None or self.failure is not None:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._status_waiters.append(waiter)
        if len(self._status_waiters) == 1:
            self._send(AskStatus())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiter, STATUS_SECONDS)

    def generate(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams,
        *,
        shows_drafts: bool = False,
        shows_trees: bool = False,
    ) -> Generation:
        """Queues the prompts; raises ApiError where there is no room for them. Who calls it has
        to close what it gets."""
        self.check_ready()
        self._take_room(len(prompts) * params.n)
        texts = [GrowingText(self._detokenizer(params)) for _ in range(len(prompts) * params.n)]
        generation = Generation(params, prompts, texts, self._cancel, shows_drafts, shows_trees)
        generation.num_unfinished = len(prompts)
        for number, prompt in enumerate(prompts):
            key = next(self._keys)
            generation.keys.append(key)
            self._open[key] = generation, number
            self._send(Submit(key, prompt.token_ids, params, shows_trees))
        loop = asyncio.get_running_loop()
        generation.timer = loop.call_later(self._timeout, self._expire, generation)
        return generation

    def _take_room(self, num_answers: int) -> None:
        assert self.ready is not None
        most = self.ready.max_num_seqs + self._max_waiting
        if num_answers > most:  # to come back later would not help
            raise ApiError(400, f"{num_answers} answers are more than the {most} this server opens")
        if not self._answers.add(num_answers, most):
            raise ApiError(
                429,
                f"the server is busy: {self._answers.total} answers are open, of at most {most}",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )

    def _detokenizer(self, params: SamplingParams) -> Detokenizer:
        return Detokenizer(
            self._decoder,
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _read(self) -> None:
        """Called by the event loop where the connection has something. One message at a time:
        what it brought is written to clients before the next is read, and meanwhile the engine
        gathers more for it."""
        try:
            self._take(self._connection.recv())
        except (EOFError, OSError):
            self._fail(GONE)

    def _take(self, message: Ready | Failed | EngineStatus | Report) -> None:
        if isinstance(message, Report):
            self._take_report(message)
        elif isinstance(message, EngineStatus):
            self._take_status(message)
        elif isinstance(message, Ready):
            self.ready = message
            self._changed.set()
        else:
            self._fail(message)

    def _take_status(self, status: EngineStatus) -> None:
        self.status = status
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._status_waiters = []

    def _take_report(self, report: Report) -> None:
        """Of requests that were cancelled meanwhile there may be news, too."""
        now, observer, num_tokens = time.monotonic(), self._observer, 0
        for growth in report.growths:
            if growth[0] in self._open:
                generation, number = self._open[growth[0]]
                generation.grow(number, growth)
                num_tokens += len(growth[2])
                observer.tokens(generation, now)
        for news in report.news:
            if news.key in self._open:
                generation, number = self._open[news.key]
                generation.take(number, news)
                if news.stats is not None:
                    self._forget(news.key)
                count = sum(len(answer.token_ids) for answer in news.answers)
                num_tokens += count
                if count:
                    observer.tokens(generation, now)
                observer.end(generation, news, now)
        observer.count(num_tokens)
        for refused in report.refused:
            if refused.key in self._open:
                self._open[refused.key][0].fail(_refusal(refused))

    def _fail(self, failure: Failed) -> None:
        """The first reason is the one that counts."""
        if self.failure is not None:
            return
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self.failure = failure
        self._changed.set()
        self._take_status(self.status)
        for generation, _ in list(self._open.values()):
            generation.fail(ApiError(500, "the engine has stopped"))

    def _expire(self, generation: Generation) -> None:
        """Whoever writes the answer may be waiting for its client: the engine goes on without."""
        if generation.num_unfinished:
            message = f"the answer took longer than {self._timeout:g} seconds"
            generation.fail(ApiError(504, message, code="timeout"))
            self._cancel(generation)

    def _cancel(self, generation: Generation) -> None:
        for key in generation.keys:
            if key in self._open:
                self._send(Abort(key))
                self._forget(key)
        if generation.timer is not None:
            generation.timer.cancel()

    def _forget(self, key: int) -> None:
        generation, _ = self._open.pop(key)
        self._answers.remove(generation.params.n)

    def _send(self, command: Submit | Abort | AskStatus) -> None:
        """In order. At once where that cannot wait: to wake a thread takes longer, and it would
        compete with this one."""
        message = pickle.dumps(command)
        with contextlib.suppress(OSError):  # a connection that breaks is noticed by the reader
            unread = num_unread(self._connection) + len(message)
            if not self._num_to_send and unread <= MAX_DIRECT_BYTES:
                self._connection.send_bytes(message)
                return
        self._num_to_send += 1
        self._to_send.put(message)

    def _send_all(self) -> None:
        """The sender's thread."""
        while (message := self._to_send.get()) is not None:
            try:
                self._connection.send_bytes(message)
                self._loop.call_soon_threadsafe(self._has_sent)
            except (OSError, TypeError, RuntimeError):  # closed, before or while we wrote
                return

    def _has_sent(self) -> None:
        self._num_to_send -= 1


def _refusal(refused: Refused) -> ApiError:
    hint = f"; {refused.hint}" if refused.hint else ""
    return ApiError(400, f"{refused.message}{hint}")

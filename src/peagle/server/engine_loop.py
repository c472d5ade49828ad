"""The engine's side of the server: requests in, steps, tokens out, over one connection.

It runs in a process of its own. Python lets one thread compute at a time, and writing HTTP for
many streams keeps one busy: in one process either would wait for the other. Messages are pickled
by `multiprocessing`, between two processes of ours.

What a step gave is not copied into messages until it is sent, so a reader that falls behind gets
fewer and longer ones, and the engine never waits for it. With many answers open, a report of all
of them is not made after every step either; first tokens and ends are told at once.
"""

from __future__ import annotations

import fcntl
import signal
import termios
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.prompts import TokenizedPrompt
from peagle.errors import PeagleError, RequestError
from peagle.outputs import FinishReason
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.engine.answers import PromptAnswers
    from peagle.engine.llm import LLM
    from peagle.engine.request import TokenLogprobs

WARM_UP = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Between two reports, for each answer of the last: some times what writing its chunk costs the
# other side, which has to read requests, too. A hundred answers get chunks 20 ms apart.
SECONDS_PER_CHUNK = 0.0002
STATUS_SECONDS = 0.2  # between two EngineStatus while nothing finishes


class Submit(NamedTuple):
    key: int
    token_ids: list[int]
    params: SamplingParams


class Abort(NamedTuple):
    key: int


class AnswerNews(NamedTuple):
    """What one answer got since the last report."""

    number: int  # of the answer, among the request's n
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    tokens_per_step: list[int]  # how the tokens fall into steps
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None


class RequestNews(NamedTuple):
    key: int
    answers: list[AnswerNews]
    num_cached_tokens: int  # those of its prompt that the prefix cache had
    stats: SpecDecodeStats | None  # of a request that ended
    num_preemptions: int = 0


class Refused(NamedTuple):
    """The engine can never serve this request."""

    key: int
    message: str
    hint: str | None


class EngineStatus(NamedTuple):
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_prefix_queries: int  # tokens of prompts
    num_prefix_hits: int
    stats: SpecDecodeStats


class Report(NamedTuple):
    news: list[RequestNews]
    refused: list[Refused]
    status: EngineStatus | None


class Ready(NamedTuple):
    """The engine is loaded and warm; what the HTTP side has to know of it."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    method: str
    num_speculative_tokens: int


class Failed(NamedTuple):
    """The engine cannot start or go on. `is_users`: by a mistake of the user's."""

    message: str
    hint: str | None = None
    is_users: bool = False


@dataclass(eq=False)
class Open:
    """A request that is being answered, and what was reported of each of its answers."""

    key: int
    answers: PromptAnswers
    num_seen: list[int] = field(init=False)  # tokens that a step's end has counted
    num_reported: list[int] = field(init=False)
    has_reported_end: list[bool] = field(init=False)
    tokens_per_step: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        n = len(self.answers.answers)
        self.num_seen, self.num_reported = [0] * n, [0] * n
        self.has_reported_end = [False] * n
        self.tokens_per_step = [[] for _ in range(n)]

    @property
    def is_urgent(self) -> bool:
        """Somebody waits for an answer's first token, or for its end."""
        return 0 in self.num_reported or self.answers.finished

    def count_step(self) -> None:
        for n, answer in enumerate(self.answers.answers):
            new = answer.request.num_outputs - self.num_seen[n]
            if new:
                self.tokens_per_step[n].append(new)
                self.num_seen[n] += new

    def news(self) -> RequestNews:
        changed = [n for n in range(len(self.num_seen)) if self._changed(n)]
        stats, preemptions = None, 0
        if self.answers.finished:
            stats = self.answers.stats
            preemptions = sum(a.request.num_preemptions for a in self.answers.answers)
        news = [self._answer_news(n) for n in changed]
        cached = self.answers.answers[0].request.num_cached_tokens
        return RequestNews(self.key, news, cached, stats, preemptions)

    def _changed(self, n: int) -> bool:
        request = self.answers.answers[n].request
        has_ended = request.finish_reason is not None
        return request.num_outputs > self.num_reported[n] or (
            has_ended and not self.has_reported_end[n]
        )

    def _answer_news(self, n: int) -> AnswerNews:
        answer, since = self.answers.answers[n], self.num_reported[n]
        request, steps = answer.request, self.tokens_per_step[n]
        self.num_reported[n], self.tokens_per_step[n] = request.num_outputs, []
        self.has_reported_end[n] = request.finish_reason is not None
        return AnswerNews(
            number=n,
            token_ids=request.token_ids[len(request.prompt_token_ids) + since :],
            logprobs=request.logprobs[since:],
            tokens_per_step=steps,
            finish_reason=request.finish_reason,
            stop_reason=answer.stop_string or request.stop_reason,
            error=request.error,
        )


class EngineLoop:
    """Owns an LLM: nobody else may step it."""

    def __init__(self, llm: LLM, connection: Connection) -> None:
        self._llm, self._connection = llm, connection
        self._open: dict[int, Open] = {}
        self._keys: dict[PromptAnswers, int] = {}
        self._changed: dict[int, Open] = {}
        self._refused: list[Refused] = []
        self._has_aborted = False  # since the last report
        self._status_at = 0.0
        self._due_at = 0.0  # when answers that are in progress are reported again

    def run(self) -> None:
        """Until the other side closes the connection."""
        self._connection.send(self._ready())
        try:
            while self._take_commands():
                self._step()
                self._report()
        finally:
            for request in list(self._open.values()):
                self._abort(request)

    def _ready(self) -> Ready:
        engine = self._llm.engine
        return Ready(
            max_model_len=engine.max_model_len,
            vocab_size=engine.target.config.vocab_size,
            max_num_seqs=engine.scheduler.max_num_seqs,
            num_blocks=engine.allocator.num_blocks,
            block_size=engine.allocator.block_size,
            method=self._llm.method,
            num_speculative_tokens=self._llm.num_speculative_tokens,
        )

    def _take_commands(self) -> bool:
        """All that are there; waits for one where there is nothing to do. False: it is over."""
        waits = not self._open
        try:
            while waits or self._connection.poll():
                command: Submit | Abort = self._connection.recv()
                waits = False
                if isinstance(command, Submit):
                    self._submit(command)
                elif command.key in self._open:
                    self._abort(self._open[command.key])
        except (EOFError, ConnectionError):
            return False
        return True

    def _step(self) -> None:
        """With nothing left to do, the engine still checks that all blocks are back."""
        for answers in self._llm.step():
            request = self._open[self._keys[answers]]
            request.count_step()
            self._changed[request.key] = request
            if answers.finished:
                self._forget(request)

    def _submit(self, command: Submit) -> None:
        key, token_ids, params = command
        try:
            answers = self._llm.add_request(TokenizedPrompt(None, token_ids), params)
        except RequestError as error:
            self._refused.append(Refused(key, error.message, error.hint))
            return
        self._open[key] = Open(key, answers)
        self._keys[answers] = key

    def _abort(self, request: Open) -> None:
        self._llm.abort_request(request.answers)
        self._changed.pop(request.key, None)
        self._has_aborted = True
        self._forget(request)

    def _forget(self, request: Open) -> None:
        del self._open[request.key]
        del self._keys[request.answers]

    def _report(self) -> None:
        """Unless the reader is busy with earlier ones; there is a later chance while requests
        are open."""
        is_due = time.monotonic() >= self._due_at
        told = [request for request in self._changed.values() if is_due or request.is_urgent]
        has_news = told or self._refused or self._has_aborted
        if not has_news or (self._open and not self._has_room()):
            return
        news = [request.news() for request in told]
        for request in told:
            del self._changed[request.key]
        has_ended = self._has_aborted or any(n.stats is not None for n in news)
        report = Report(news, self._refused, self._status(has_ended))
        self._refused, self._has_aborted = [], False
        self._connection.send(report)
        if is_due:
            self._due_at = time.monotonic() + SECONDS_PER_CHUNK * len(told)

    def _has_room(self) -> bool:
        """A report more, and a busy reader would read many short ones where a long one costs
        hardly more than each."""
        return not num_unread(self._connection)

    def _status(self, due: bool) -> EngineStatus | None:
        now = time.monotonic()
        if not due and now - self._status_at < STATUS_SECONDS:
            return None
        self._status_at = now
        engine = self._llm.engine
        return EngineStatus(
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            engine.allocator.num_free,
            engine.scheduler.prefix_cache_stats.queries,
            engine.scheduler.prefix_cache_stats.hits,
            self._llm.stats,
        )


def num_unread(connection: Connection) -> int:
    """Bytes that were sent and that the other side has not read, the kernel's own included."""
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), "little")


def run_engine(connection: Connection, make: Callable[[], LLM]) -> None:
    """Makes the engine and runs its loop; whatever ends it early is told to the other side."""
    try:
        loop = EngineLoop(make(), connection)
        loop.run()
    except PeagleError as error:
        connection.send(Failed(error.message, error.hint, is_users=True))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the other side has gone
    except BaseException as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        connection.close()


def engine_process(
    connection: Connection, model: str, engine: EngineConfig, drafter: SpeculativeConfig | None
) -> None:
    """The main function of the engine's process. Signals are the HTTP side's: it tells us to stop
    by closing the connection, when open answers are finished."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_engine(connection, lambda: warm_llm(model, engine, drafter))


def warm_llm(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> LLM:
    """An engine that has answered once: what the first answer compiles or allocates is there."""
    from peagle.engine.llm import LLM

    llm = LLM(model, speculative_config=drafter, **asdict(engine))
    llm.generate({"prompt_token_ids": [0]}, WARM_UP)
    vars(llm.stats).update(vars(SpecDecodeStats()))  # it was nobody's answer
    return llm

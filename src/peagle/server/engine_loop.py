"""The engine's side of the server: requests in, steps, tokens out, by a channel per API server.

It runs in a process of its own. Python lets one thread compute at a time, and writing HTTP for
many streams keeps one busy: in one process either would wait for the other. Messages are pickled
by `multiprocessing`, between processes of ours. Keys of requests are an API server's own.

What a step gave is not copied into messages until it is sent, so a reader that falls behind gets
fewer and longer ones, and the engine never waits for it. With many answers open, a report of all
of them is not made after every step either; first tokens and ends are told at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import signal
import termios
import time
from collections.abc import Callable, Sequence
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
    from peagle.engine.request import DraftTree, TokenLogprobs

WARM_UP = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
# Between two reports, for each answer of the last: some times what writing its chunk costs the
# other side, which has to read requests, too. A hundred answers get chunks 20 ms apart.
SECONDS_PER_CHUNK = 0.0002
ROOM_SECONDS = 0.001  # between two looks at a reader that is busy, while there are no steps


class Submit(NamedTuple):
    key: int
    token_ids: list[int]
    params: SamplingParams
    shows_trees: bool = False


class Abort(NamedTuple):
    key: int


class AskStatus(NamedTuple):
    """Answered by an EngineStatus, behind the steps whose tokens were reported."""


class AnswerNews(NamedTuple):
    """What one answer got since the last report."""

    number: int  # of the answer, among the request's n
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    tokens_per_step: list[int]  # how the tokens fall into steps
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    trees: list[DraftTree] | None = None  # of these steps, where the request asks for them


# Tokens of an answer that goes on: key, number, token_ids, tokens_per_step. Nearly all news are
# such, and plain tuples are pickled and read in a sixth of the time.
Growth = tuple[int, int, list[int], list[int]]


class RequestNews(NamedTuple):
    """What is more than growth: logprobs, trees, ends."""

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
    growths: list[Growth]
    news: list[RequestNews]
    refused: list[Refused]


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
    channel: Channel
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

    def tell(self, report: Report) -> None:
        """Adds what changed since the last report."""
        answers = [self._answer_news(n) for n in range(len(self.num_seen)) if self._changed(n)]
        if not self.answers.finished and not any(map(_is_more_than_growth, answers)):
            report.growths.extend((self.key, a[0], a.token_ids, a.tokens_per_step) for a in answers)
            return
        stats, preemptions = None, 0
        if self.answers.finished:
            stats = self.answers.stats
            preemptions = sum(a.request.num_preemptions for a in self.answers.answers)
        cached = self.answers.answers[0].request.num_cached_tokens
        report.news.append(RequestNews(self.key, answers, cached, stats, preemptions))

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
        trees = request.draft_trees
        if trees is not None:
            request.draft_trees = []
        return AnswerNews(
            number=n,
            token_ids=request.token_ids[len(request.prompt_token_ids) + since :],
            logprobs=request.logprobs[since:],
            tokens_per_step=steps,
            finish_reason=request.finish_reason,
            stop_reason=answer.stop_string or request.stop_reason,
            error=request.error,
            trees=trees,
        )


def _is_more_than_growth(news: AnswerNews) -> bool:
    return bool(news.logprobs or news.trees) or news.finish_reason is not None


@dataclass(eq=False)
class Channel:
    """To one API server, with its open requests and what it was not told yet."""

    connection: Connection
    open: dict[int, Open] = field(default_factory=dict)
    changed: dict[int, Open] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    due_at: float = 0.0  # when answers that are in progress are reported again

    @property
    def has_news(self) -> bool:
        return bool(self.changed or self.refused)

    def report(self) -> None:
        """Unless the reader is busy with an earlier one: it would read many short ones where a
        long one costs hardly more than each."""
        now = time.monotonic()
        is_due = now >= self.due_at
        told = [request for request in self.changed.values() if is_due or request.is_urgent]
        if not (told or self.refused) or not self.has_room():
            return
        report = Report([], [], self.refused)
        for request in told:
            request.tell(report)
            del self.changed[request.key]
        self.refused = []
        self.connection.send(report)
        if is_due:
            self.due_at = now + SECONDS_PER_CHUNK * len(told)

    def has_room(self) -> bool:
        return not num_unread(self.connection)


class EngineLoop:
    """Owns an LLM: nobody else may step it."""

    def __init__(self, llm: LLM, connections: Sequence[Connection]) -> None:
        self._llm = llm
        self._channels = [Channel(connection) for connection in connections]
        self._open: dict[PromptAnswers, Open] = {}
        self._selector = selectors.DefaultSelector()
        for channel in self._channels:
            self._selector.register(channel.connection, selectors.EVENT_READ, channel)

    def run(self) -> None:
        """Until the other sides have closed all channels."""
        _tell([channel.connection for channel in self._channels], self._ready())
        try:
            while self._take_commands():
                self._step()
                self._report()
        finally:
            self._selector.close()
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
        timeout: float | None = 0.0
        if not self._open:
            has_news = any(channel.has_news for channel in self._channels)
            timeout = ROOM_SECONDS if has_news else None
        while self._channels and (ready := self._selector.select(timeout)):
            timeout = 0.0
            for key, _ in ready:
                self._take_command(key.data)
        return bool(self._channels)

    def _take_command(self, channel: Channel) -> None:
        try:
            command: Submit | Abort | AskStatus = channel.connection.recv()
            if isinstance(command, AskStatus):
                channel.connection.send(self._status())
        except (EOFError, OSError):
            self._leave(channel)
            return
        if isinstance(command, Submit):
            self._submit(channel, command)
        elif isinstance(command, Abort) and command.key in channel.open:
            self._abort(channel.open[command.key])

    def _leave(self, channel: Channel) -> None:
        """The API server has closed its side, or died: nobody reads its answers."""
        self._selector.unregister(channel.connection)
        self._channels.remove(channel)
        for request in list(channel.open.values()):
            self._abort(request)
        channel.connection.close()

    def _step(self) -> None:
        """With nothing left to do, the engine still checks that all blocks are back."""
        for answers in self._llm.step():
            request = self._open[answers]
            request.count_step()
            request.channel.changed[request.key] = request
            if answers.finished:
                self._forget(request)

    def _submit(self, channel: Channel, command: Submit) -> None:
        key, token_ids, params, shows_trees = command
        prompt = TokenizedPrompt(None, token_ids)
        try:
            answers = self._llm.add_request(prompt, params, keeps_trees=shows_trees)
        except RequestError as error:
            channel.refused.append(Refused(key, error.message, error.hint))
            return
        self._open[answers] = channel.open[key] = Open(key, channel, answers)

    def _abort(self, request: Open) -> None:
        self._llm.abort_request(request.answers)
        request.channel.changed.pop(request.key, None)
        self._forget(request)

    def _forget(self, request: Open) -> None:
        del request.channel.open[request.key]
        del self._open[request.answers]

    def _report(self) -> None:
        """What is not reported now has a later chance."""
        for channel in list(self._channels):
            try:
                channel.report()
            except OSError:
                self._leave(channel)

    def _status(self) -> EngineStatus:
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


def run_engine(connections: Sequence[Connection], make: Callable[[], LLM]) -> None:
    """Makes the engine and runs its loop; whatever ends it early is told to the other sides."""
    try:
        loop = EngineLoop(make(), connections)
        loop.run()
    except PeagleError as error:
        _tell(connections, Failed(error.message, error.hint, is_users=True))
    except BaseException as error:
        _tell(connections, Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        for connection in connections:
            connection.close()


def _tell(connections: Sequence[Connection], message: Ready | Failed) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # it has gone, which is noticed elsewhere
            connection.send(message)


def engine_process(
    connections: Sequence[Connection],
    model: str,
    engine: EngineConfig,
    drafter: SpeculativeConfig | None,
) -> None:
    """The main function of the engine's process. Signals are for the process that started it: the
    API servers close their channels when open answers are finished."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_engine(connections, lambda: warm_llm(model, engine, drafter))


def warm_llm(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> LLM:
    """An engine that has answered once: what the first answer compiles or allocates is there."""
    from peagle.engine.llm import LLM

    llm = LLM(model, speculative_config=drafter, **asdict(engine))
    llm.generate({"prompt_token_ids": [0]}, WARM_UP)
    vars(llm.stats).update(vars(SpecDecodeStats()))  # it was nobody's answer
    return llm

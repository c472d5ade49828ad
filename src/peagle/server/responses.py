"""Answers and streams of server-sent events, from an open request."""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peagle.server.async_llm import Delta, Generation
from peagle.server.errors import ApiError, client_has_gone
from peagle.server.protocol import (
    Answer,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    DraftedStep,
    DraftedText,
    DraftNode,
    Metrics,
    PromptTokensDetails,
    SpeculativeDecoding,
    StreamOptions,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from peagle.server.tool_calls import ToolCallReader
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.engine.request import DraftTree, TokenLogprobs

LOWEST_LOGPROB = -9999.0  # for -inf, which JSON has no word for; vLLM writes the same
DONE = b"data: [DONE]\n\n"
MARK = "text"
# JSON leaves them as they are, and some clients take them for the end of an event's line.
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
encode_json = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(eq=False)
class AnswerWriter(ABC):
    """Writes one generation's answers in one of the two shapes, whole or as events."""

    request_id: str
    model: str
    generation: Generation
    tokenizer: Any
    options: StreamOptions = field(default_factory=StreamOptions)
    shows_token_ids: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _frames: dict[int, tuple[str, str]] = field(default_factory=dict)  # of choices that began

    @abstractmethod
    def chunk(self, delta: Delta) -> list[Completion] | list[ChatCompletion]:
        """The chunks that tell what one answer got."""

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> Completion | ChatCompletion:
        """All answers at once, one delta each."""

    @abstractmethod
    def without_choices(self) -> Completion | ChatCompletion:
        """A chunk that holds only figures."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Nearly all chunks differ from the one before in their text alone: their JSON is made
        once, and the text put into it."""
        only_text, events = self.tells_only_text, []
        for delta in deltas:
            frame = self._frames.get(delta.choice)
            if frame is None or not only_text or delta.finish_reason is not None:
                written = self._full_events(delta)
                events += written
                if only_text and written:  # the answer has begun
                    self._frames[delta.choice] = self._frame(delta.choice)
            elif delta.text:
                events.append(f"{frame[0]}{encode_json(delta.text)}{frame[1]}")
        text = "".join(events)
        return (text if text.isascii() else LINE_ENDS.sub(_escaped, text)).encode()

    @cached_property
    def tells_only_text(self) -> bool:
        """Chunks have nothing but text until an answer ends."""
        usage = self.options.continuous_usage_stats and self.options.include_usage
        shows_drafts = self.generation.shows_drafts or self.generation.shows_trees
        return not (usage or self._shows_tokens or shows_drafts)

    def _full_events(self, delta: Delta) -> list[str]:
        if not self._says_something(delta):
            return []
        chunks = self.chunk(delta)
        if self.options.continuous_usage_stats and self.options.include_usage:
            for chunk in chunks:
                chunk.usage = self.usage()
        return list(map(_event, chunks))

    def _frame(self, choice: int) -> tuple[str, str]:
        """What stands before and after the text in the chunks of an answer that has begun."""
        (chunk,) = self.chunk(Delta(choice, MARK, [], [], None, None, None))
        before, _, after = _event(chunk).rpartition(encode_json(MARK))
        return before, after

    def last_events(self) -> bytes:
        """After all answers have ended."""
        if not self.options.include_usage:
            return DONE
        chunk = self.without_choices()
        chunk.usage, chunk.metrics = self.usage(), self.metrics()
        return _event(chunk).encode() + DONE

    def usage(self) -> Usage:
        generation = self.generation
        prompt, completion = generation.num_prompt_tokens, generation.num_output_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=generation.num_cached_tokens),
        )

    def metrics(self) -> Metrics:
        generation, now = self.generation, time.monotonic()
        first = generation.first_token_at
        metrics = Metrics(
            time_to_first_token=None if first is None else first - generation.arrived,
            e2e_latency=now - generation.arrived,
        )
        if generation.stats.num_drafts:
            metrics.speculative_decoding = _speculative_decoding(generation.stats)
        return metrics

    def finish_reason(self, delta: Delta) -> str | None:
        return delta.finish_reason

    def _says_something(self, delta: Delta) -> bool:
        """Not if its text may still become a stop string, or is not a whole character."""
        ends = delta.finish_reason is not None
        return bool(delta.text or delta.trees) or ends or self._shows_tokens

    @property
    def _shows_tokens(self) -> bool:
        return self.shows_token_ids or self.generation.params.logprobs is not None

    def _extras(self, delta: Delta) -> dict[str, Any]:
        """vLLM's keys of a choice, and ours."""
        extras: dict[str, Any] = {}
        if delta.finish_reason is not None:
            extras["stop_reason"] = delta.stop_reason
        if self.shows_token_ids:
            extras["token_ids"] = delta.token_ids
        if delta.drafts is not None:
            extras["drafts"] = [DraftedText(text=p.text, drafted=p.drafted) for p in delta.drafts]
        if delta.trees is not None:
            extras["trees"] = [self._drafted_step(tree) for tree in delta.trees]
        return extras

    def _drafted_step(self, tree: DraftTree) -> DraftedStep:
        drafts = zip(tree.token_ids, tree.parents, strict=True)
        nodes = [
            DraftNode(text=self._decoded(token), parent=parent, accepted=n in tree.accepted)
            for n, (token, parent) in enumerate(drafts, start=1)
        ]
        return DraftedStep(nodes=nodes, bonus=self._decoded(tree.bonus_token_id))

    def _decoded(self, token: int) -> str:
        text: str = self.tokenizer.decode([token])
        return text


@dataclass(eq=False)
class CompletionWriter(AnswerWriter):
    echoes: bool = False
    _num_characters: dict[int, int] = field(default_factory=dict)  # of each choice so far
    _started: set[int] = field(default_factory=set)

    def chunk(self, delta: Delta) -> list[Completion]:
        return [self._completion([self._choice(delta)])]

    def whole(self, deltas: Sequence[Delta]) -> Completion:
        document = self._completion([self._choice(delta) for delta in deltas])
        document.usage, document.metrics = self.usage(), self.metrics()
        return document

    def without_choices(self) -> Completion:
        return self._completion([])

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
        )

    def _choice(self, delta: Delta) -> CompletionChoice:
        extras, text = self._extras(delta), delta.text
        if delta.choice not in self._started:
            self._started.add(delta.choice)
            prompt = self.generation.prompts[delta.choice // self.generation.params.n]
            if self.shows_token_ids:
                extras["prompt_token_ids"] = prompt.token_ids
            if self.echoes:
                shown = prompt.text
                text = (self.tokenizer.decode(prompt.token_ids) if shown is None else shown) + text
        return CompletionChoice(
            index=delta.choice,
            text=text,
            logprobs=self._logprobs(delta),
            finish_reason=self.finish_reason(delta),
            **extras,
        )

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        tokens = [self._decoded(entry.token_ids[0]) for entry in delta.logprobs]
        offsets, at = [], self._num_characters.get(delta.choice, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._num_characters[delta.choice] = at
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[_finite(entry.logprobs[0]) for entry in delta.logprobs],
            tokens=tokens,
            top_logprobs=[
                {
                    self._decoded(token): _finite(value)
                    for token, value in zip(entry.token_ids, entry.logprobs, strict=True)
                }
                for entry in delta.logprobs
            ],
        )


@dataclass(eq=False)
class ChatWriter(AnswerWriter):
    new_reader: Callable[[], ToolCallReader] | None = None  # None: text is content
    _tool_readers: dict[int, ToolCallReader] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)

    @cached_property
    def tells_only_text(self) -> bool:
        return self.new_reader is None and super().tells_only_text

    def chunk(self, delta: Delta) -> list[ChatCompletion]:
        chunks = []
        if delta.choice not in self._started:
            self._started.add(delta.choice)
            first = ChatMessage(role="assistant", content="")
            choice = ChatChoice(index=delta.choice, delta=first, logprobs=None, finish_reason=None)
            chunks.append(self._completion([choice], "chat.completion.chunk"))
            if self.shows_token_ids:
                prompt = self.generation.prompts[delta.choice // self.generation.params.n]
                chunks[0].prompt_token_ids = prompt.token_ids
        message = self._message(delta)
        choice = ChatChoice(
            index=delta.choice,
            delta=message,
            logprobs=self._logprobs(delta),
            finish_reason=self.finish_reason(delta),
            **self._extras(delta),
        )
        return [*chunks, self._completion([choice], "chat.completion.chunk")]

    def whole(self, deltas: Sequence[Delta]) -> ChatCompletion:
        document = self._completion([self._choice(delta) for delta in deltas], "chat.completion")
        document.usage, document.metrics = self.usage(), self.metrics()
        if self.shows_token_ids:
            document.prompt_token_ids = self.generation.prompts[0].token_ids
        return document

    def without_choices(self) -> ChatCompletion:
        return self._completion([], "chat.completion.chunk")

    def finish_reason(self, delta: Delta) -> str | None:
        reader = self._tool_readers.get(delta.choice)
        called = delta.finish_reason == "stop" and reader is not None and reader.num_calls
        return "tool_calls" if called else delta.finish_reason

    def _completion(self, choices: list[ChatChoice], kind: Any) -> ChatCompletion:
        return ChatCompletion(
            id=self.request_id, object=kind, created=self.created, model=self.model, choices=choices
        )

    def _choice(self, delta: Delta) -> ChatChoice:
        message = self._message(delta)
        message.role = "assistant"
        message.content = message.content or (None if message.tool_calls else "")
        for call in message.tool_calls or ():
            call.index = None
            call.model_fields_set.discard("index")  # streams alone number them
        return ChatChoice(
            index=delta.choice,
            message=message,
            logprobs=self._logprobs(delta),
            finish_reason=self.finish_reason(delta),
            **self._extras(delta),
        )

    def _message(self, delta: Delta) -> ChatMessage:
        if self.new_reader is None:
            return ChatMessage(content=delta.text)
        if delta.choice not in self._tool_readers:
            self._tool_readers[delta.choice] = self.new_reader()
        reader = self._tool_readers[delta.choice]
        found = reader.add(delta.text, ended=delta.finish_reason is not None)
        message = ChatMessage(content=found.content)
        if found.reasoning:
            message.reasoning = found.reasoning
        if found.calls:
            message.tool_calls = found.calls
        return message

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        return ChatLogprobs(content=[self._token_logprob(entry) for entry in delta.logprobs])

    def _token_logprob(self, entry: TokenLogprobs) -> TokenLogprob:
        named = [
            self._top_logprob(token, value)
            for token, value in zip(entry.token_ids, entry.logprobs, strict=True)
        ]
        own, best = named[0], named[1:]
        return TokenLogprob(
            token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=best
        )

    def _top_logprob(self, token: int, logprob: float) -> TopLogprob:
        text = self._decoded(token)
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(text.encode()))


class EventStream(Response):
    """A stream of server-sent events. A client that goes away ends its request."""

    media_type = "text/event-stream"

    def __init__(
        self, writer: AnswerWriter, first: Sequence[Delta], watching: asyncio.Task[None]
    ) -> None:
        self.status_code, self.background = 200, None
        self.init_headers()
        self._writer, self._first, self._watching = writer, first, watching

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(send)
        finally:
            self._watching.cancel()
            self._writer.generation.close()

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        writer, generation = self._writer, self._writer.generation
        events = writer.events(self._first)
        try:
            while not generation.finished:
                if events:
                    await _send_body(send, events)
                events = writer.events(await generation.next())
            events += writer.last_events()
        except ApiError as error:  # the status is sent; clients know this form
            events = b"data: " + json.dumps(error.document).encode() + b"\n\n" + DONE
        await _send_body(send, events, more=False)


async def respond(writer: AnswerWriter, receive: Receive, *, stream: bool) -> Response:
    """The whole answer, or a stream once its first tokens are there, so that a refusal has a
    status of its own. Closes the generation unless a stream goes on with it."""
    generation, streams = writer.generation, False
    watching = asyncio.create_task(_fail_when_disconnected(receive, generation))
    try:
        if not stream:
            return json_response(writer.whole(await _all_deltas(generation)))
        first = await generation.next()
        streams = True
        return EventStream(writer, first, watching)
    finally:
        if not streams:
            watching.cancel()
            generation.close()


async def _fail_when_disconnected(receive: Receive, generation: Generation) -> None:
    """The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(client_has_gone())


async def _all_deltas(generation: Generation) -> list[Delta]:
    """One for each answer, in order."""
    whole: dict[int, Delta] = {}
    while not generation.finished:
        for delta in await generation.next():
            before = whole.get(delta.choice)
            whole[delta.choice] = delta if before is None else _joined(before, delta)
    return [whole[choice] for choice in sorted(whole)]


def _joined(before: Delta, delta: Delta) -> Delta:
    drafts = None if delta.drafts is None else [*(before.drafts or ()), *delta.drafts]
    return delta._replace(
        text=before.text + delta.text,
        token_ids=before.token_ids + delta.token_ids,
        logprobs=before.logprobs + delta.logprobs,
        drafts=drafts,
        trees=None if delta.trees is None else [*(before.trees or ()), *delta.trees],
    )


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(document: Completion | ChatCompletion) -> str:
    return f"data: {document.model_dump_json(exclude_unset=True)}\n\n"


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def json_response(document: Answer) -> Response:
    return Response(document.model_dump_json(exclude_unset=True), media_type="application/json")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _speculative_decoding(stats: SpecDecodeStats) -> SpeculativeDecoding:
    return SpeculativeDecoding(
        num_steps=stats.num_steps,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_accepted_tokens_per_pos=stats.num_accepted_tokens_per_pos,
        mean_acceptance_length=stats.mean_acceptance_length,
        acceptance_rate=stats.acceptance_rate,
    )

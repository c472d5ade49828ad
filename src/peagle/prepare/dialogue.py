"""One conversation on its way to rows: prompt, answer, next prompt with that answer in it.

An answer is fed back as its text, because that is what a client sends back when serving. Mostly
the next prompt then begins with the very tokens so far, and all turns make one row. Where it
does not (the text tokenizes otherwise, the template drops something), the next turn starts a row
of its own: a row never holds tokens that serving would not see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from peagle.data.chat import Message, chat_token_ids
from peagle.data.dataset import Row
from peagle.data.prompts import Conversation
from peagle.errors import DataError
from peagle.prepare.answers import Question, TargetAnswer
from peagle.speculation.looping import loop_start

Renderer = Callable[[list[Message]], list[int]]


def chat_renderer(tokenizer: Any, system: str | None = None) -> Renderer:
    """`system` is for conversations that bring no system message of their own."""

    def render(messages: list[Message]) -> list[int]:
        own = messages[0]["role"] == "system"
        first: list[Message] = [] if own or system is None else [_message("system", system)]
        return chat_token_ids(tokenizer, first + messages)

    return render


def raw_renderer(tokenizer: Any) -> Renderer:
    """The prompt as it is, for models without a chat template."""

    def render(messages: list[Message]) -> list[int]:
        if len(messages) > 1:
            raise DataError("a conversation needs a chat template")
        ids: list[int] = tokenizer.encode(messages[0]["content"])
        return ids

    return render


@dataclass(frozen=True)
class RowBuilder:
    """How the answers of any conversation become rows."""

    render: Renderer
    decode: Callable[[list[int]], str]
    seed: int
    cut_loops: int | None  # tokens kept after a loop begins; None: all


@dataclass(eq=False)
class Dialogue:
    """One conversation: its next question, and the rows of what was answered so far."""

    conversation: Conversation
    builder: RowBuilder
    _rows: list[Row] = field(default_factory=list)
    _messages: list[Message] = field(default_factory=list)
    _turn: int = 0
    _ended: bool = False
    _tokens: list[int] = field(default_factory=list)  # the open row
    _mask: list[int] = field(default_factory=list)
    _clipped: bool = False
    _looping: bool = False

    def __post_init__(self) -> None:
        if self.conversation.system is not None:
            self._messages.append(_message("system", self.conversation.system))

    def next_question(self) -> Question | None:
        """None: the conversation is over."""
        turns = self.conversation.turns
        if self._ended or self._turn == len(turns):
            return None
        self._messages.append(_message("user", turns[self._turn]))
        self._turn += 1
        prompt = self.builder.render(self._messages)
        return Question(prompt, derived_seed(self.builder.seed, self.conversation.id, self._turn))

    def take(self, question: Question, answer: TargetAnswer) -> None:
        self._begin_answer(question.prompt_token_ids)
        start = loop_start(answer.token_ids)
        kept = answer.token_ids
        if start is not None and self.builder.cut_loops is not None:
            kept = kept[: start + self.builder.cut_loops]
        self._ended = len(kept) < len(answer.token_ids)  # nobody goes on after a loop
        self._tokens += kept
        self._mask += [1] * len(kept)
        self._clipped |= answer.clipped
        self._looping |= start is not None
        self._messages.append(_message("assistant", self.builder.decode(answer.token_ids)))

    def finish(self) -> list[Row]:
        self._close_row()
        return self._rows

    def _begin_answer(self, prompt: list[int]) -> None:
        known = len(self._tokens)
        if prompt[:known] != self._tokens:
            self._close_row()
            known = 0
        self._tokens += prompt[known:]
        self._mask += [0] * (len(prompt) - known)

    def _close_row(self) -> None:
        if not self._tokens:
            return
        number = len(self._rows) + 1
        name = self.conversation.id if number == 1 else f"{self.conversation.id}#{number}"
        category = self.conversation.category
        self._rows.append(
            Row(name, self._tokens, self._mask, category, self._clipped, self._looping)
        )
        self._tokens, self._mask, self._clipped, self._looping = [], [], False, False


def derived_seed(seed: int, row_id: str, turn: int) -> int:
    """A row's answer depends on its own name, not on its neighbours or on a resumption."""
    digest = hashlib.sha256(f"{seed} {turn} {row_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

"""One conversation on its way to rows: prompt, answer, next prompt with that answer in it.

An answer is fed back as its text, because that is what a client sends back when serving. Mostly
the next prompt then begins with the very tokens so far, and all turns make one row. Where it
does not (the text tokenizes otherwise, the template drops something), the next turn starts a row
of its own: a row never holds tokens that serving would not see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peagle.data.dataset import Row
from peagle.data.prompts import Conversation, Message, with_system
from peagle.engine.prompts import PromptReader
from peagle.errors import DataError
from peagle.prepare.answers import Question, TargetAnswer
from peagle.speculation.looping import loop_start

Renderer = Callable[[list[Message]], list[int]]


def chat_renderer(
    tokenizer: Any, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> Renderer:
    """`system` is for conversations that bring no system message of their own."""
    reader = PromptReader(tokenizer)

    def render(messages: list[Message]) -> list[int]:
        rendered = reader.render_chat(with_system(messages, system), kwargs=template_kwargs)
        ids: list[int] = rendered["prompt_token_ids"]
        return ids

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
class DialogueOptions:
    """How every conversation of a dataset is asked, and what is kept of its answers."""

    render: Renderer
    # An answer as a client sends it back; None: there is nothing that it could send.
    decode: Callable[[list[int]], str | None]
    seed: int
    cut_loops: int | None  # tokens kept after a loop begins; None: all


class Dialogue:
    """One conversation: its next question, and the rows of what was answered so far."""

    def __init__(self, conversation: Conversation, options: DialogueOptions) -> None:
        self.conversation, self.options = conversation, options
        self._messages: list[Message] = []
        self._turn = 0
        self.num_answers = 0
        self._ended = False
        self._builder = RowBuilder(conversation.id, conversation.category)
        if conversation.system is not None:
            self._messages.append(_message("system", conversation.system))

    def next_question(self) -> Question | None:
        """None: the conversation is over."""
        turns = self.conversation.turns
        if self._ended or self._turn == len(turns):
            return None
        self._messages.append(_message("user", turns[self._turn]))
        self._turn += 1
        prompt = self.options.render(self._messages)
        return Question(prompt, derived_seed(self.options.seed, self.conversation.id, self._turn))

    def take(self, question: Question, answer: TargetAnswer) -> None:
        self.num_answers += 1
        start = loop_start(answer.token_ids)
        kept = answer.token_ids
        if start is not None and self.options.cut_loops is not None:
            kept = kept[: start + self.options.cut_loops]
        self._ended = len(kept) < len(answer.token_ids)  # nobody goes on after a loop
        self._builder.add(
            question.prompt_token_ids, kept, clipped=answer.clipped, looping=start is not None
        )
        text = self.options.decode(answer.token_ids)
        if text is None:
            self._ended = True
        else:
            self._messages.append(_message("assistant", text))

    def finish(self) -> list[Row]:
        return self._builder.finish()


class RowBuilder:
    """Turns as rows: a prompt that extends the tokens so far goes on in the same row."""

    def __init__(self, name: str, category: str) -> None:
        self.name, self.category = name, category
        self._rows: list[Row] = []
        self._open_row()

    def _open_row(self) -> None:
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._clipped = self._looping = False

    def add(self, prompt: list[int], answer: list[int], *, clipped: bool, looping: bool) -> None:
        if prompt[: len(self._tokens)] != self._tokens:
            self._close_row()
        new = prompt[len(self._tokens) :]
        self._tokens += new + answer
        self._mask += [0] * len(new) + [1] * len(answer)
        self._clipped |= clipped
        self._looping |= looping

    def finish(self) -> list[Row]:
        self._close_row()
        return self._rows

    def _close_row(self) -> None:
        if not self._tokens:
            return
        number = len(self._rows) + 1
        name = self.name if number == 1 else f"{self.name}#{number}"
        row = Row(name, self._tokens, self._mask, self.category, self._clipped, self._looping)
        self._rows.append(row)
        self._open_row()


def derived_seed(seed: int, row_id: str, turn: int) -> int:
    """A row's answer depends on its own name, not on its neighbours or on a resumption."""
    digest = hashlib.sha256(f"{seed} {turn} {row_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:7], "big")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}

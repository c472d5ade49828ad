"""What a chat model writes beside plain text: its reasoning and its tool calls, by model family.

Hermes, Qwen   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
Qwen3-Coder    <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
Gemma-4        <|channel>thought ...<channel|>  and  <|tool_call>call:f{x:1}<tool_call|>
GPT-OSS        <|channel|>analysis<|message|>...<|end|>, then final for the answer, and after a
(harmony)      channel's name to=functions.f for a call

All of it is generated, so all of it is supervised. A client gets it apart, and sends back the
content alone: the server and `prepare` read answers by the same reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

QUOTE = '<|"|>'  # Gemma's, around texts
Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments of each function


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


Parse = Callable[[re.Match[str], str, Schemas], Call | None]


@dataclass(frozen=True)
class Block:
    """A part of an answer that is not plain text."""

    begins: str  # the literal that its opening begins with
    close: str  # of content: nothing, plain text goes on
    kind: Literal["call", "reasoning", "content"]
    header: str = ""  # a pattern: what completes the opening
    may_stay_open: bool = False  # of a call: the answer's end closes it, too
    parse: Parse | None = None  # of a call

    def opening(self, text: str, at: int) -> re.Match[str] | None:
        return re.compile(re.escape(self.begins) + self.header).match(text, at)


@dataclass(frozen=True)
class AnswerFormat:
    blocks: tuple[Block, ...]
    dropped: tuple[str, ...] = ()  # marks that stand for nothing
    in_special_tokens: bool = False  # its marks are gone from a text without those


@dataclass
class _Parts:
    """What one piece of an answer's text brought."""

    contents: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


class Found(NamedTuple):
    content: str
    reasoning: str
    calls: list[Call]


def answer_format(chat_template: object) -> AnswerFormat | None:
    """By the marks that a template writes for earlier turns; None: plain text alone."""
    if not isinstance(chat_template, str):
        return None
    if "<|channel|>" in chat_template:
        return HARMONY
    if "<|tool_call>" in chat_template or "<|channel>" in chat_template:
        return GEMMA_4
    if "<tool_call>" not in chat_template:
        return None
    return QWEN3_CODER if "<function=" in chat_template else HERMES


def sent_back(text: str, form: AnswerFormat | None) -> str | None:
    """What a client sends back of an answer.

    None where it has nothing to go on with: the answer was cut while it reasoned, or it calls a
    tool, whose answer nobody has.
    """
    if form is None:
        return text
    found = AnswerReader(form).add(text, ended=True)
    return None if found.calls or (text and not found.content) else found.content


@dataclass(eq=False)
class AnswerReader:
    """Splits an answer as it grows. However its text is cut into pieces, the same comes out.

    What may become a mark is held back; so is whitespace, which belongs to a call that follows. A
    call that cannot be read, or that never ends, is content.
    """

    form: AnswerFormat
    schemas: Schemas = field(default_factory=dict)
    reads_calls: bool = True
    _rest: str = ""
    _called: bool = False
    _thought: Block | None = None  # the one that is open
    _thought_begun: bool = False  # it is more than whitespace

    def add(self, text: str, *, ended: bool) -> Found:
        self._rest += text
        parts = _Parts()
        while self._reads_on(parts, ended):
            pass
        if self._thought is None:
            shown = len(self._rest) if ended else self._num_certain()
            last = self._take(shown, shown)
            parts.contents.append(last.rstrip() if ended and self._called else last)
        return Found("".join(parts.contents), "".join(parts.reasoning), parts.calls)

    def _reads_on(self, parts: _Parts, ended: bool) -> bool:
        """Reads past the next mark; False: there is none, or not the whole of it yet."""
        if self._thought is not None:
            return self._read_thought(self._thought, parts, ended)
        at = self._first_mark()
        if at is None:
            return False
        mark = next((m for m in self.form.dropped if self._rest.startswith(m, at)), None)
        if mark is not None:
            parts.contents.append(self._take(at, at + len(mark)))
            return True
        block, opening = self._block(at)
        if block is None or opening is None:
            return False
        if block.kind == "call":
            return self._read_call(block, opening, parts, ended)
        parts.contents.append(self._take(at, opening.end()))
        if block.kind == "reasoning":
            self._thought, self._thought_begun = block, False
        return True

    def _read_thought(self, block: Block, parts: _Parts, ended: bool) -> bool:
        """It is given as it comes, without the whitespace around it."""
        if not self._thought_begun:
            self._rest = self._rest.lstrip()
            self._thought_begun = bool(self._rest)
        at = self._rest.find(block.close)
        closed = at >= 0
        if not closed:
            at = len(self._rest) - (0 if ended else _overlap(self._rest, block.close))
        shown = len(self._rest[:at].rstrip())
        after = at + len(block.close) if closed else at if ended else shown
        parts.reasoning.append(self._take(shown, after))
        if closed:
            self._thought = None
        return closed

    def _read_call(self, block: Block, opening: re.Match[str], parts: _Parts, ended: bool) -> bool:
        at = self._rest.find(block.close, opening.end())
        if at < 0 and not (ended and block.may_stay_open):
            return False
        end, after = (at, at + len(block.close)) if at >= 0 else (len(self._rest),) * 2
        assert block.parse is not None
        call = block.parse(opening, self._rest[opening.end() : end], self.schemas)
        if call is None:
            parts.contents.append(self._take(after, after))
        else:
            parts.contents.append(self._take(opening.start(), after).rstrip())
            parts.calls.append(call)
            self._called = True
        return True

    def _take(self, shown: int, end: int) -> str:
        """Removes the rest up to `end`; -> what of it is shown."""
        text, self._rest = self._rest[:shown], self._rest[end:]
        return text

    @property
    def _blocks(self) -> list[Block]:
        return [b for b in self.form.blocks if self.reads_calls or b.kind != "call"]

    @property
    def _marks(self) -> list[str]:
        return [*{b.begins: None for b in self._blocks}, *self.form.dropped]

    def _first_mark(self) -> int | None:
        found = [at for mark in self._marks if (at := self._rest.find(mark)) >= 0]
        return min(found, default=None)

    def _block(self, at: int) -> tuple[Block, re.Match[str]] | tuple[None, None]:
        """The first whose opening is whole."""
        for block in self._blocks:
            opening = block.opening(self._rest, at)
            if opening is not None:
                return block, opening
        return None, None

    def _num_certain(self) -> int:
        """Characters of the rest that can belong to no mark."""
        at = self._first_mark()
        if at is None:
            held = max((_overlap(self._rest, mark) for mark in self._marks), default=0)
            at = len(self._rest) - held
        return len(self._rest[:at].rstrip())


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of a text with which the mark begins."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)


def json_call(body: str) -> Call | None:
    call = _json(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return Call(call["name"], arguments if isinstance(arguments, str) else _dumped(arguments))


def _xml_call(body: str, schemas: Schemas) -> Call | None:
    """Values are texts as they are; the function's schema says which are something else."""
    called = _FUNCTION.fullmatch(body)
    if called is None:
        return None
    known = schemas.get(called["name"], {}).get("properties") or {}
    arguments = {
        found["name"]: _typed(found["value"], known.get(found["name"], {}))
        for found in _PARAMETER.finditer(called["parameters"])
    }
    return Call(called["name"], _dumped(arguments))


_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\s]+)>(?P<parameters>.*?)(?:</function>)?\s*", re.DOTALL
)
# A value may hold the closing mark itself: the last one before another parameter counts.
_PARAMETER = re.compile(
    r"<parameter=(?P<name>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|$))",
    re.DOTALL,
)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    kinds = schema.get("type", "string")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds == ["string"]:
        return text
    value = _json(text)
    if value is _UNREADABLE:
        value = _json(text.lower())  # True, None
    readable = value is not _UNREADABLE and ("string" not in kinds or value is None)
    return value if readable else text


def _gemma_call(body: str) -> Call | None:
    """As JSON: quoted texts and bare keys become JSON's, numbers and lists are already."""
    called = re.fullmatch(r"\s*call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})\s*", body, re.DOTALL)
    if called is None:
        return None
    parts = called["arguments"].split(QUOTE)
    quoted = [_dumped(p) if n % 2 else _BARE_KEY.sub(r'\1"\2":', p) for n, p in enumerate(parts)]
    arguments = _json("".join(quoted))
    return Call(called["name"], _dumped(arguments)) if isinstance(arguments, dict) else None


_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")


def _harmony_call(name: str, body: str) -> Call | None:
    arguments = _json(body or "{}")
    return Call(name, _dumped(arguments)) if isinstance(arguments, dict) else None


_UNREADABLE = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _UNREADABLE


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tool_call(parse: Parse) -> AnswerFormat:
    return AnswerFormat((Block("<tool_call>", "</tool_call>", "call", parse=parse),))


HERMES = _tool_call(lambda opening, body, schemas: json_call(body))
QWEN3_CODER = _tool_call(lambda opening, body, schemas: _xml_call(body, schemas))
GEMMA_4 = AnswerFormat(
    (
        Block(
            "<|tool_call>",
            "<tool_call|>",
            "call",
            parse=lambda opening, body, schemas: _gemma_call(body),
        ),
        Block("<|channel>", "<channel|>", "reasoning", header=r"[^\n<]*\n"),
    ),
    dropped=("<turn|>", "<|tool_response>", "<eos>"),
    in_special_tokens=True,
)
_TO_MESSAGE = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
HARMONY = AnswerFormat(
    (
        Block(
            "<|channel|>",
            "<|call|>",
            "call",
            header=r"\w+ to=functions\.(?P<name>[\w.-]+)" + _TO_MESSAGE,
            may_stay_open=True,
            parse=lambda opening, body, schemas: _harmony_call(opening["name"], body),
        ),
        Block("<|channel|>", "<|end|>", "reasoning", header="analysis" + _TO_MESSAGE),
        Block("<|channel|>", "", "content", header=_TO_MESSAGE),
    ),
    dropped=("<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
    in_special_tokens=True,
)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Of OpenAI's tools."""
    functions = [tool["function"] for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}

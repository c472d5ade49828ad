"""Tool calls of an answer as the OpenAI API has them, and their schema."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peagle.data.chat_formats import AnswerFormat, AnswerReader, Call, json_call, schemas_of
from peagle.server.errors import ApiError
from peagle.server.protocol import CalledFunction, CalledTool, NamedTool, Tool


class Found(NamedTuple):
    content: str
    reasoning: str
    calls: list[CalledTool]


@dataclass(eq=False)
class ToolCallReader:
    """Splits an answer, as it grows, into content, reasoning and calls, which it numbers.

    `form` None: the whole answer is one call in JSON, because that was asked for.
    """

    form: AnswerFormat | None
    tools: Sequence[Tool] = ()  # none: calls are content
    only_first: bool = False
    num_calls: int = 0
    _whole: str = ""
    _reader: AnswerReader | None = field(init=False)

    def __post_init__(self) -> None:
        schemas = schemas_of([tool.model_dump() for tool in self.tools])
        form, reads_calls = self.form, bool(self.tools)
        self._reader = AnswerReader(form, schemas, reads_calls) if form else None

    def add(self, text: str, *, ended: bool) -> Found:
        if self._reader is not None:
            found = self._reader.add(text, ended=ended)
            return Found(found.content, found.reasoning, self._numbered(found.calls))
        self._whole += text
        call = json_call(self._whole) if ended else None
        content = self._whole if ended and call is None else ""
        return Found(content, "", self._numbered([call] if call else []))

    def _numbered(self, calls: Sequence[Call]) -> list[CalledTool]:
        first, self.num_calls = self.num_calls, self.num_calls + len(calls)
        kept = [] if self.only_first and first else calls[: 1 if self.only_first else None]
        return [
            CalledTool(
                id=f"call_{uuid.uuid4().hex[:24]}",
                type="function",
                function=CalledFunction(name=call.name, arguments=call.arguments),
                index=index,
            )
            for index, call in enumerate(kept, first)
        ]


def call_schema(tools: Sequence[Tool], choice: NamedTool | None) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, or of the one that is chosen."""
    functions = [tool.function for tool in tools]
    if choice is not None:
        functions = [f for f in functions if f.name == choice.function.name]
    if not functions:
        raise ApiError(400, "tool_choice names no function of tools", param="tool_choice")
    schemas = [function.parameters or {"type": "object"} for function in functions]
    if len(schemas) == 1:
        return _one_call(functions[0].name, schemas[0], "#")
    named = enumerate(zip(functions, schemas, strict=True))
    return {"anyOf": [_one_call(f.name, schema, f"#/anyOf/{n}") for n, (f, schema) in named]}


def _one_call(name: str, schema: dict[str, Any], place: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "arguments": _moved(schema, f"{place}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at this place of another: what it says of its own parts is still so."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    own = schema.get("$ref")
    if isinstance(own, str) and own.startswith("#"):
        moved["$ref"] = place + own[1:]
    return moved

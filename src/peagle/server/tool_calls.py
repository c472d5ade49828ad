"""Tool calls in an answer's text, found as it grows: `<tool_call>` with JSON, as Hermes and Qwen
models write them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peagle.server.errors import ApiError
from peagle.server.protocol import CalledFunction, CalledTool, NamedTool, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Found(NamedTuple):
    content: str
    calls: list[CalledTool]


@dataclass(eq=False)
class ToolCallReader:
    """Splits an answer into content and calls. However the text is cut into pieces, the same
    content and the same calls come out.

    What may become a call is held back; so is whitespace, which belongs to a call that follows.
    A call that is not JSON, or that never ends, is content. `is_call`: the whole answer is one
    call without marks, because its form was asked for.
    """

    only_first: bool = False
    is_call: bool = False
    num_calls: int = 0
    _rest: str = field(default="")

    def add(self, text: str, *, ended: bool) -> Found:
        self._rest += text
        if self.is_call:
            return self._whole_call() if ended else Found("", [])
        contents: list[str] = []
        calls: list[CalledTool] = []
        while True:
            before, opened, behind = self._rest.partition(OPEN)
            body, closed, after = behind.partition(CLOSE)
            if not (opened and closed):
                break
            function = _parse(body)
            if function is None:
                contents.append(f"{before}{OPEN}{body}{CLOSE}")
            else:
                contents.append(before.rstrip())
                calls += self._numbered(function)
            self._rest = after
        shown = len(self._rest) if ended else self._num_certain()
        contents.append(self._rest[:shown])
        self._rest = self._rest[shown:]
        if ended and self.num_calls:
            contents[-1] = contents[-1].rstrip()
        return Found("".join(contents), calls)

    def _whole_call(self) -> Found:
        function = _parse(self._rest)
        return Found(self._rest, []) if function is None else Found("", self._numbered(function))

    def _numbered(self, function: CalledFunction) -> list[CalledTool]:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self.only_first and index:
            return []
        return [CalledTool(id=f"call_{uuid.uuid4().hex[:24]}", function=function, index=index)]

    def _num_certain(self) -> int:
        """Characters of the rest that cannot belong to a call."""
        at = self._rest.find(OPEN)
        if at < 0:
            lengths = range(min(len(OPEN) - 1, len(self._rest)), 0, -1)
            held = next((n for n in lengths if self._rest.endswith(OPEN[:n])), 0)
            at = len(self._rest) - held
        return len(self._rest[:at].rstrip())


def call_schema(tools: Sequence[Tool], choice: NamedTool | None) -> dict[str, Any]:
    """The JSON schema of a call of one of the tools, or of the one that is chosen."""
    functions = [tool.function for tool in tools]
    if choice is not None:
        functions = [f for f in functions if f.name == choice.function.name]
    if not functions:
        raise ApiError(400, "tool_choice names no function of tools", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parse(body: str) -> CalledFunction | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return CalledFunction(name=call["name"], arguments=arguments)

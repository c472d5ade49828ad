"""Calls of an answer are numbered; all of them, or the first alone, or the answer as a whole."""

from __future__ import annotations

import json

import jsonschema
import pytest

from peagle.data.chat_formats import HERMES
from peagle.server.protocol import Function, NamedFunction, NamedTool, Tool
from peagle.server.tool_calls import ToolCallReader, call_schema

CALL = '{"name": "f", "arguments": {"x": 1}}'
TOOLS = [Tool(type="function", function=Function(name="f"))]
TWO = [f"<tool_call>{CALL}</tool_call>"] * 2


@pytest.mark.parametrize("pieces", [TWO, ["".join(TWO)], [*"".join(TWO)]])
@pytest.mark.parametrize(("only_first", "kept"), [(False, [0, 1]), (True, [0])])
def test_calls_are_numbered_in_order(pieces: list[str], only_first: bool, kept: list[int]) -> None:
    reader = ToolCallReader(HERMES, TOOLS, only_first)
    calls = [call for piece in pieces for call in reader.add(piece, ended=False).calls]
    assert [call.index for call in calls] == kept
    assert len({call.id for call in calls}) == len(kept)


def test_calls_are_content_where_there_are_no_tools() -> None:
    found = ToolCallReader(HERMES).add(TWO[0], ended=True)
    assert (found.content, found.calls) == (TWO[0], [])


@pytest.mark.parametrize(("text", "is_call"), [(CALL, True), ("{no json", False), ("[1]", False)])
def test_a_whole_answer_that_was_asked_for_is_one_call(text: str, is_call: bool) -> None:
    reader = ToolCallReader(None, TOOLS)
    assert reader.add(text[:5], ended=False) == ("", "", [])
    found = reader.add(text[5:], ended=True)
    assert len(found.calls) == is_call
    assert found.content == ("" if is_call else text)
    assert [json.loads(call.function.arguments) for call in found.calls] == [{"x": 1}] * is_call


def test_a_schema_s_references_hold_inside_the_schema_of_a_call() -> None:
    """pydantic writes `$defs` for every model within a model."""
    tree = {"type": "object", "required": ["on"], "additionalProperties": False}
    tree["properties"] = {"on": {"type": "boolean"}, "sub": {"$ref": "#/$defs/Tree"}}
    recursive = {"$defs": {"Tree": tree}, "$ref": "#/$defs/Tree"}
    of_itself = {"type": "array", "items": {"$ref": "#"}}
    tools = [
        Tool(type="function", function=Function(name=name, parameters=parameters))
        for name, parameters in (("f", recursive), ("g", of_itself))
    ]
    named = NamedTool(type="function", function=NamedFunction(name="f"))
    for schema in (call_schema(tools, named), call_schema(tools, None)):
        jsonschema.validate({"name": "f", "arguments": {"on": True, "sub": {"on": False}}}, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"name": "f", "arguments": {"on": True, "sub": {}}}, schema)
    jsonschema.validate({"name": "g", "arguments": [[], [[]]]}, call_schema(tools, None))

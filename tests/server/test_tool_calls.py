"""Claim: calls and content are the same however an answer is cut into chunks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.server.protocol import CalledTool
from peagle.server.tool_calls import CLOSE, OPEN, ToolCallReader

CALL = OPEN + '\n{"name": "f", "arguments": {"x": 1}}\n' + CLOSE
PARTS = st.sampled_from([CALL, OPEN, CLOSE, "<tool", " \n", "text", "<", OPEN + "{no json" + CLOSE])


def read(pieces: list[str], *, only_first: bool = False) -> tuple[str, list[CalledTool]]:
    reader, content, calls = ToolCallReader(only_first), "", []
    for n, piece in enumerate(pieces):
        found = reader.add(piece, ended=n == len(pieces) - 1)
        content += found.content
        calls += found.calls
    return content, calls


@given(st.lists(PARTS, max_size=6).map("".join), st.data())
def test_chunks_do_not_change_what_is_found(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole_content, whole_calls = read([text])
    content, calls = read(pieces)
    assert content == whole_content
    assert [c.function for c in calls] == [c.function for c in whole_calls]
    assert [c.index for c in calls] == list(range(len(calls)))


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["f"]),
        (f"Let me look.\n{CALL}\n{CALL}\n", "Let me look.", ["f", "f"]),
        ("no call\n", "no call\n", []),
        (f"{OPEN}not JSON{CLOSE}", f"{OPEN}not JSON{CLOSE}", []),
        (f"{OPEN}[1]{CLOSE} x", f"{OPEN}[1]{CLOSE} x", []),
        (f"{OPEN}" + '{"name": "f"', f"{OPEN}" + '{"name": "f"', []),
    ],
)
def test_what_is_json_between_the_marks_is_a_call(
    text: str, content: str, names: list[str]
) -> None:
    found, calls = read([text])
    assert found == content
    assert [call.function.name for call in calls] == names
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)


def test_one_call_at_most_where_no_others_are_wanted() -> None:
    assert len(read([CALL + CALL], only_first=True)[1]) == 1

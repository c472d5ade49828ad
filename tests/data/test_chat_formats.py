"""Content, reasoning and calls of an answer, however it is cut into chunks, in each format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.data.chat_formats import (
    GEMMA_4,
    HARMONY,
    HERMES,
    QWEN3_CODER,
    AnswerFormat,
    AnswerReader,
    Found,
    answer_format,
    schemas_of,
    sent_back,
)

FORMATS = {"hermes": HERMES, "qwen3-coder": QWEN3_CODER, "gemma-4": GEMMA_4, "harmony": HARMONY}
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": "boolean"},
    "more": {"type": "object"},
    "note": {"type": ["string", "null"]},
}
TOOL = {"function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}
START, FINAL = "<|start|>assistant", "<|channel|>final<|message|>"
HM = "<|channel|>analysis<|message|>hm<|end|>"
TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"count": 1}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "gemma-4": "<|tool_call>call:f{count:1}<tool_call|>",
    "harmony": f'{START}{TO}{{"count": 1}}<|call|>',
}
THOUGHTS = {"gemma-4": "<|channel>thought\nhm<channel|>", "harmony": f"{HM}{START}{FINAL}"}
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "<tool_call>no</tool_call>"],
    "qwen3-coder": ["<tool_call>", "<function=f>", "</tool_call>", "<tool_call><function=f"],
    "gemma-4": ["<|tool_call>", "<tool_call|>", "<|channel>", "<turn|>", "<|", "<|tool_call>x"],
    "harmony": [START, "<|channel|>", "<|message|>", "<|end|>", "<|return|>", TO, "<|call|>"],
}


def read(form: AnswerFormat, pieces: list[str], *, calls: bool = True) -> Found:
    reader = AnswerReader(form, schemas_of([TOOL]), calls)
    found = [reader.add(p, ended=n == len(pieces) - 1) for n, p in enumerate(pieces)]
    return Found(
        "".join(f.content for f in found),
        "".join(f.reasoning for f in found),
        [call for f in found for call in f.calls],
    )


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_chunks_do_not_change_what_is_found(name: str, data: st.DataObject) -> None:
    parts = [CALLS[name], THOUGHTS.get(name, ""), "text", " \n", "<", *PIECES[name]]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(FORMATS[name], pieces) == read(FORMATS[name], [text])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_stand_beside_the_content_before_them(name: str) -> None:
    space = "" if name == "harmony" else "\n"  # which has no text between messages
    found = read(FORMATS[name], [f"Let me look.{space}{CALLS[name]}{space}{CALLS[name]}{space}"])
    assert (found.content, found.reasoning) == ("Let me look.", "")
    assert found.calls == [("f", '{"count": 1}')] * 2


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_no_content(name: str) -> None:
    end = {"gemma-4": "<turn|>", "harmony": "<|return|>"}[name]
    assert read(FORMATS[name], [f"{THOUGHTS[name]}yes{end}"]) == ("yes", "hm", [])
    assert read(FORMATS[name], [THOUGHTS[name].removesuffix(FINAL)]).content == ""


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_given_as_it_comes(name: str) -> None:
    reader = AnswerReader(FORMATS[name])
    opening = THOUGHTS[name].partition("hm")[0]
    assert reader.add(f"{opening}\n first ", ended=False) == ("", "first", [])
    assert reader.add("then <", ended=False) == ("", " then", [])
    assert reader.add("b ", ended=True) == ("", " <b", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>not JSON</tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call> x"),
        ("hermes", '<tool_call>{"name": "f"'),
        ("qwen3-coder", '<tool_call>{"name": "f"}</tool_call>'),
        ("qwen3-coder", "<tool_call><function=f>"),
        ("gemma-4", "<|tool_call>f{}<tool_call|>"),
        ("gemma-4", '<|tool_call>call:f{path:<|"|>a}<tool_call|>'),
        ("gemma-4", "<|tool_call>call:f{path:a b}<tool_call|>"),
        ("harmony", f"{TO}[1]<|call|>"),
        ("harmony", "a plain text"),
    ],
)
def test_what_cannot_be_read_as_a_call_is_content(name: str, text: str) -> None:
    assert read(FORMATS[name], [text]) == (text, "", [])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_content_where_nobody_reads_them(name: str) -> None:
    found = read(FORMATS[name], [CALLS[name]], calls=False)
    assert found.calls == []
    assert "count" in found.content


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("path", "1", "1"),
        ("path", "\n  indented\n", "\n  indented\n"),
        ("path", "a </parameter> b", "a </parameter> b"),
        ("count", "3", 3),
        ("count", "three", "three"),
        ("deep", "True", True),
        ("more", '{"a": [1]}', {"a": [1]}),
        ("note", "null", None),
        ("note", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_the_schema_says_what_a_parameter_of_qwen3_coder_is(
    parameter: str, text: str, value: object
) -> None:
    inside = f"<function=f>\n<parameter={parameter}>\n{text}\n</parameter>\n</function>"
    ((name, arguments),) = read(QWEN3_CODER, [f"<tool_call>\n{inside}\n</tool_call>"]).calls
    assert (name, json.loads(arguments)) == ("f", {parameter: value})


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{}", {}),
        ('{path:<|"|>a, "b": {c}<|"|>,count:2}', {"path": 'a, "b": {c}', "count": 2}),
        ('{more:{a:[1,<|"|>x<|"|>,{b:null}]}}', {"more": {"a": [1, "x", {"b": None}]}}),
        ("{deep:true}", {"deep": True}),
        ('{path:<|"|>two\nlines<|"|>}', {"path": "two\nlines"}),
    ],
)  # fmt: skip
def test_the_arguments_of_gemma_are_json_in_other_quotes(written: str, arguments: object) -> None:
    ((_, found),) = read(GEMMA_4, [f"<|tool_call>call:f{written}<tool_call|>"]).calls
    assert json.loads(found) == arguments


def test_a_template_shows_the_format() -> None:
    qwen = "For each call write <tool_call>{{ json }}</tool_call>"
    assert answer_format(qwen) is HERMES
    assert answer_format(qwen.replace("{{ json }}", "<function=f></function>")) is QWEN3_CODER
    assert answer_format("{{ '<|turn>model' }}<|tool_call>call:{{ name }}") is GEMMA_4
    assert answer_format("<|start|>assistant<|channel|>final") is HARMONY
    assert answer_format("<start_of_turn>model") is answer_format(None) is None


@pytest.mark.parametrize(
    ("name", "text", "back"),
    [
        ("harmony", f"{HM}{START}{FINAL}yes<|return|>", "yes"),
        ("harmony", f"{HM}{START}", None),
        ("harmony", "<|channel|>analysis<|message|>and so", None),
        ("gemma-4", "<|channel>thought\nhm<channel|>yes<turn|>", "yes"),
        ("gemma-4", "<|channel>thought\nhm", None),
        ("gemma-4", "yes<turn|>", "yes"),
        ("hermes", "yes", "yes"),
        *((name, f"Well.{call}", None) for name, call in CALLS.items()),
    ],
)
def test_a_client_sends_back_the_content_if_there_is_any(
    name: str, text: str, back: str | None
) -> None:
    assert sent_back(text, FORMATS[name]) == back


def test_a_plain_answer_is_sent_back_as_it_is() -> None:
    assert sent_back("<tool_call> ", None) == "<tool_call> "

"""Answers written from what an engine gave, without one: tool calls in chunks and whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.data.chat_formats import GEMMA_4, HERMES, AnswerFormat
from peagle.engine.prompts import TokenizedPrompt
from peagle.sampling_params import SamplingParams
from peagle.server.async_llm import Delta, Generation
from peagle.server.protocol import Function, StreamOptions, Tool
from peagle.server.responses import AnswerWriter, ChatWriter, CompletionWriter
from peagle.server.tool_calls import ToolCallReader

TEXT = 'I look it up.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
TOOL = Tool(type="function", function=Function(name="f"))


def writer(form: AnswerFormat = HERMES, **options: Any) -> ChatWriter:
    prompts = [TokenizedPrompt(None, [1, 2])]
    generation = Generation(SamplingParams(), prompts, [], lambda generation: None)
    reader = partial(ToolCallReader, form, [TOOL])
    return ChatWriter("id", "m", generation, None, new_reader=reader, **options)


def delta(text: str, reason: Any = None) -> Delta:
    return Delta(0, text, [1], [], reason, None, None)


def streamed(pieces: list[str]) -> list[dict[str, Any]]:
    made, events = writer(), b""
    for n, piece in enumerate(pieces):
        events += made.events([delta(piece, "stop" if n == len(pieces) - 1 else None)])
    lines = events.decode().split("\n\n")[:-1]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


@pytest.mark.parametrize("size", [1, 5, 200])
def test_calls_are_deltas_of_a_stream_and_nothing_of_their_text_leaks(size: int) -> None:
    choices = streamed([TEXT[at : at + size] for at in range(0, len(TEXT), size)])
    content = "".join(c["delta"].get("content") or "" for c in choices)
    assert content == "I look it up."
    (call,) = [call for c in choices for call in c["delta"].get("tool_calls", ())]
    assert (call["index"], call["type"]) == (0, "function")
    assert call["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    assert choices[0]["delta"]["role"] == "assistant"


def test_reasoning_stands_beside_the_content() -> None:
    text = "<|channel>thought\nhm<channel|>yes<turn|>"
    document = writer(GEMMA_4).whole([delta(text, "stop")]).model_dump(exclude_unset=True)
    message = document["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "yes", "reasoning": "hm"}


def test_a_whole_answer_has_its_calls_beside_its_content() -> None:
    document = writer().whole([delta(TEXT, "stop")]).model_dump(exclude_unset=True)
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look it up."
    (call,) = choice["message"]["tool_calls"]
    assert "index" not in call
    assert call["type"] == "function"


def test_an_answer_that_is_cut_keeps_its_reason_and_its_text() -> None:
    cut = TEXT[:-20]
    document = writer().whole([delta(cut, "length")])
    assert document.choices[0].finish_reason == "length"
    assert document.choices[0].message is not None
    assert document.choices[0].message.content == cut


def plain_writer(kind: Callable[..., AnswerWriter], options: StreamOptions) -> AnswerWriter:
    prompts = [TokenizedPrompt("p", [1, 2])]
    generation = Generation(SamplingParams(n=2), prompts, [], lambda generation: None)
    return kind("id", 'a "text" model', generation, None, options, created=7)


ECHO = partial(CompletionWriter, echoes=True)


@given(st.lists(st.tuples(st.integers(0, 1), st.text(max_size=4)), max_size=6), st.integers(1, 8))
@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter, ECHO])
def test_chunks_of_text_alone_are_those_that_the_protocol_s_models_write(
    kind: Callable[..., AnswerWriter], told: list[tuple[int, str]], at_once: int
) -> None:
    """A report may bring news of several answers, of which some have no text yet."""
    deltas = [Delta(choice, text, [1], [], None, None, None) for choice, text in told]
    deltas += [Delta(choice, "end", [1], [], "stop", None, None) for choice in range(2)]
    quick, full = (plain_writer(kind, StreamOptions()) for _ in range(2))
    expected = "".join(event for one in deltas for event in full._full_events(one))
    batches = [deltas[at : at + at_once] for at in range(0, len(deltas), at_once)]
    written = b"".join(map(quick.events, batches)).decode()
    assert len(written.splitlines()) == written.count("\n")  # as some clients split it
    assert list(map(read_event, written.split("\n\n"))) == list(
        map(read_event, expected.split("\n\n"))
    )


def read_event(text: str) -> Any:
    return json.loads(text.removeprefix("data: ") or "null")


def test_an_event_is_one_line_for_whoever_splits_at_unicode_s_line_ends() -> None:
    text = "a\x85b\u2028c\u2029d\x0b\n"
    made = plain_writer(ChatWriter, StreamOptions())
    written = b"".join(made.events([delta(text)]) for _ in range(2)).decode()
    lines = [line for line in written.splitlines() if line]
    contents = [read_event(line)["choices"][0]["delta"]["content"] for line in lines]
    assert contents == ["", text, text]

"""A model with marks of its own: clients get content, reasoning and calls, and no marks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from peagle.engine.llm import LLM
from tests.tiny.folders import CHAT_TEMPLATE, write_model

from .running import NAME, running_server

SPECIAL = 262  # the token id of <|tool_call>, if it has one
TEMPLATE = "{% if tools %}{{ tools | tojson }} <|tool_call>{% endif %}" + CHAT_TEMPLATE
THOUGHT = "<|channel>thought\nhm<channel|>"
CALL = '<|tool_call>call:f{x:<|"|>a<|"|>}<tool_call|>'
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@contextmanager
def serving(folder: Path, *, special: bool = False) -> Iterator[OpenAI]:
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 512, "vocab_size": SPECIAL + 1}
    write_model(folder, TEMPLATE, **sizes)
    if special:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["<|tool_call>"], special_tokens=True)
        assert tokenizer.convert_tokens_to_ids("<|tool_call>") == SPECIAL
        tokenizer.save_pretrained(folder)
    with running_server(lambda: LLM(str(folder), device="cpu", max_num_seqs=2)) as server:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """All marks are bytes here, so that a grammar can ask for them."""
    with serving(tmp_path_factory.mktemp("models") / "bytes") as client:
        yield client


def ask(client: OpenAI, answer: str, **options: Any) -> Any:
    """Whatever the tiny model would say, it says this."""
    form = {"guided_choice": [answer]}
    keys: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, **options}
    extra = {**form, **keys.pop("extra_body", {})}
    return client.chat.completions.create(**keys, extra_body=extra)


def test_reasoning_is_apart_from_the_content_whole_and_streamed(client: OpenAI) -> None:
    whole = ask(client, f"{THOUGHT}yes").choices[0].message
    assert (whole.content, whole.reasoning) == ("yes", "hm")
    chunks = list(ask(client, f"{THOUGHT}yes", stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"


def test_calls_are_read_where_there_are_tools(client: OpenAI) -> None:
    answer = ask(client, f"{THOUGHT}Well. {CALL}", tools=[TOOL]).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Well.")
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x": "a"}')
    assert ask(client, CALL).choices[0].message.content == CALL
    silent = ask(client, CALL, tools=[TOOL], tool_choice="none").choices[0].message
    assert (silent.content, silent.tool_calls) == (CALL, None)


def test_marks_that_are_special_tokens_are_seen(tmp_path: Path) -> None:
    keys: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 1, "tools": [TOOL]}
    with serving(tmp_path, special=True) as client:
        answer = client.chat.completions.create(logit_bias={str(SPECIAL): 100}, **keys)
    assert answer.choices[0].message.content == "<|tool_call>", "a call that never ends is content"


def test_special_tokens_that_are_asked_for_stay(client: OpenAI) -> None:
    asked = {"skip_special_tokens": False}
    message = ask(client, f"{THOUGHT}yes", extra_body=asked).choices[0].message
    assert (message.content or "").startswith(f"{THOUGHT}yes")

"""Claim: the official `openai` client works unmodified, and gets what the engine gives alone."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from peagle.engine.llm import LLM
from peagle.sampling_params import SamplingParams

from .running import NAME, RunningServer

MESSAGES: Any = [{"role": "user", "content": "abc the €é 😀"}]
SAMPLED = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
KEYS = {"model": NAME, "seed": 3, "max_tokens": 30, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made
    server.wait_until_idle()


def test_chat_is_the_engine_s_own_answer(client: OpenAI, alone: LLM) -> None:
    got = client.chat.completions.create(messages=MESSAGES, **KEYS)
    (expected,) = alone.chat(MESSAGES, SAMPLED)
    (choice,) = got.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert got.object == "chat.completion"
    assert got.model == NAME
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == 30
    assert got.usage.total_tokens == got.usage.prompt_tokens + 30


def test_a_stream_joined_is_the_whole_answer(client: OpenAI, alone: LLM) -> None:
    stream = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **KEYS
    )
    chunks = list(stream)
    (expected,) = alone.chat(MESSAGES, SAMPLED)
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == expected.outputs[0].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 30
    assert all(c.usage is None for c in chunks[:-1])


def test_completions_take_texts_and_token_ids(client: OpenAI, alone: LLM) -> None:
    prompts: Any = ["abc", "the", "a b"]
    got = client.completions.create(prompt=prompts, **KEYS)
    expected = [alone.generate(prompt, SAMPLED)[0].outputs[0].text for prompt in prompts]
    assert [c.text for c in got.choices] == expected
    assert [c.index for c in got.choices] == [0, 1, 2]
    ids = [alone.get_tokenizer().encode(prompt) for prompt in prompts]
    again = client.completions.create(prompt=ids, **KEYS)
    assert [c.text for c in again.choices] == expected
    one = client.completions.create(prompt=ids[0], echo=True, **KEYS)
    assert one.choices[0].text == "abc" + expected[0]


def test_n_answers_are_those_of_the_engine_whole_and_streamed(client: OpenAI, alone: LLM) -> None:
    (expected,) = alone.generate("abc", SamplingParams(n=3, seed=3, max_tokens=30, ignore_eos=True))
    texts = [output.text for output in expected.outputs]
    assert len(set(texts)) == 3
    got = client.completions.create(prompt="abc", n=3, **KEYS)
    assert [c.text for c in got.choices] == texts
    joined = ["", "", ""]
    ends = []
    stream = client.completions.create(prompt="abc", n=3, stream=True, **KEYS)
    for chunk in stream:
        for choice in chunk.choices:
            joined[choice.index] += choice.text
            ends += [choice.index] if choice.finish_reason else []
    assert joined == texts
    assert sorted(ends) == [0, 1, 2]


def test_async_streams_run_side_by_side(server: RunningServer, alone: LLM) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=MESSAGES, seed=seed, max_tokens=20, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(12)))

    got = asyncio.run(ask_all())
    params = [SamplingParams(seed=seed, max_tokens=20) for seed in range(12)]
    assert got == [alone.chat(MESSAGES, p)[0].outputs[0].text for p in params]
    server.wait_until_idle()


def test_logprobs_are_the_engine_s(client: OpenAI, alone: LLM) -> None:
    params = SamplingParams(seed=3, max_tokens=5, logprobs=2, ignore_eos=True)
    (expected,) = alone.chat(MESSAGES, params)
    keys = KEYS | {"max_tokens": 5}
    got = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **keys)
    content = got.choices[0].logprobs.content
    tokens = expected.outputs[0].token_ids
    assert expected.outputs[0].logprobs is not None
    chosen = [
        named[token] for named, token in zip(expected.outputs[0].logprobs, tokens, strict=True)
    ]
    assert [entry.token for entry in content] == [entry.decoded_token for entry in chosen]
    assert [e.logprob for e in content] == pytest.approx([e.logprob for e in chosen], abs=1e-4)
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    other = client.completions.create(prompt="abc", logprobs=2, **keys)
    assert len(other.choices[0].logprobs.token_logprobs) == 5
    assert other.choices[0].logprobs.text_offset[0] == 0


def test_a_stop_string_never_leaks(client: OpenAI, alone: LLM) -> None:
    (whole,) = alone.chat(MESSAGES, SAMPLED)
    text = whole.outputs[0].text
    stops = [text[at : at + n] for n in (1, 2, 3) for at in range(5, 15, 3)]
    for stop in (s for s in stops if "\ufffd" not in s):
        keys = KEYS | {"stop": [stop]}
        stream = client.chat.completions.create(messages=MESSAGES, stream=True, **keys)
        chunks = [c.choices[0] for c in stream]
        joined = "".join(c.delta.content or "" for c in chunks)
        assert joined == text[: text.index(stop)]
        assert chunks[-1].finish_reason == "stop"
        assert chunks[-1].stop_reason == stop
        got = client.chat.completions.create(messages=MESSAGES, **keys)
        assert got.choices[0].message.content == joined


def test_speculation_is_chosen_per_request_and_counted(client: OpenAI) -> None:
    answers = []
    for k in (None, 0, 2):
        keys = KEYS | {
            "extra_body": {"ignore_eos": True, "speculative": {"num_speculative_tokens": k}}
        }
        answers.append(client.completions.create(prompt="abc", **keys))
    assert len({a.choices[0].text for a in answers}) == 1
    default, plain, two = (a.metrics for a in answers)
    assert "speculative_decoding" not in plain
    assert len(two["speculative_decoding"]["num_accepted_tokens_per_pos"]) == 2
    assert len(default["speculative_decoding"]["num_accepted_tokens_per_pos"]) == 4
    counted = default["speculative_decoding"]
    assert counted["num_drafts"] <= counted["num_steps"]


def test_drafted_text_is_told_apart_and_joins_to_the_answer(client: OpenAI) -> None:
    keys = KEYS | {"extra_body": {"ignore_eos": True, "speculative": {"show_drafts": True}}}
    got = client.completions.create(prompt="abc", **keys)
    pieces = got.choices[0].drafts
    assert "".join(piece["text"] for piece in pieces) == got.choices[0].text
    plain = client.completions.create(prompt="abc", **KEYS)
    assert plain.choices[0].text == got.choices[0].text


def test_models_and_errors_are_openai_s(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == (NAME, "peagle")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")
    keys: Any = {"model": NAME, "max_tokens": 4}
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(messages=MESSAGES, temperature=-1, **keys)
    with pytest.raises(openai.BadRequestError, match="unknown parameter 'temprature'"):
        client.chat.completions.create(messages=MESSAGES, extra_body={"temprature": 1}, **keys)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="a" * 600, **keys)
    assert caught.value.code == "context_length_exceeded"
    deep = {"speculative": {"num_speculative_tokens": 60}}
    with pytest.raises(openai.BadRequestError, match="more than this p-eagle drafter"):
        client.completions.create(prompt="a", stream=True, extra_body=deep, **keys)


def test_tools_reach_the_template_and_templates_without_them_refuse(client: OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    keys: Any = {"model": NAME, "max_tokens": 4, "messages": MESSAGES}
    plain = client.chat.completions.create(**keys)
    with_tools = client.chat.completions.create(tools=[tool], **keys)
    assert with_tools.usage.prompt_tokens > plain.usage.prompt_tokens
    assert client.chat.completions.create(tools=[tool], tool_choice="none", **keys).choices
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(tool_choice="required", **keys)


def test_the_reasoning_effort_reaches_the_template(client: OpenAI) -> None:
    keys: Any = {"model": NAME, "max_tokens": 4, "messages": MESSAGES}
    plain = client.chat.completions.create(**keys).usage.prompt_tokens
    with_effort = client.chat.completions.create(reasoning_effort="high", **keys)
    assert with_effort.usage.prompt_tokens > plain
    by_variable = {"chat_template_kwargs": {"reasoning_effort": "high"}}
    same = client.chat.completions.create(extra_body=by_variable, **keys)
    assert same.usage.prompt_tokens == with_effort.usage.prompt_tokens


def test_a_required_tool_is_called_with_arguments_of_its_schema(client: OpenAI) -> None:
    """The tiny model has never seen a tool: the form is all that makes it call one."""
    size = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"size": size}, "required": ["size"]}
    schema["additionalProperties"] = False
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"
    ]
    keys: Any = {"model": NAME, "messages": MESSAGES, "tools": tools, "max_tokens": 200}
    named: Any = {"type": "function", "function": {"name": "g"}}
    for choice in ("required", named):
        whole = client.chat.completions.create(tool_choice=choice, seed=2, **keys).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        assert call.function.name in (["g"] if choice is named else ["f", "g"])
        jsonschema.validate(json.loads(call.function.arguments), schema)
        stream = client.chat.completions.create(tool_choice=choice, seed=2, stream=True, **keys)
        deltas = [chunk.choices[0].delta for chunk in stream]
        (streamed,) = [c for delta in deltas for c in delta.tool_calls or ()]
        assert (streamed.function.name, streamed.function.arguments, streamed.index) == (
            call.function.name,
            call.function.arguments,
            0,
        )
    turn = [*MESSAGES, whole.message.model_dump(exclude_none=True)]
    turn.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    assert client.chat.completions.create(**keys | {"messages": turn, "max_tokens": 2}).choices


def test_a_tool_of_nested_models_can_be_forced(client: OpenAI) -> None:
    size = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    size["additionalProperties"] = False
    schema: Any = {"$defs": {"Size": size}, "$ref": "#/$defs/Size"}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    got = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=200
    )
    (call,) = got.choices[0].message.tool_calls or ()
    assert isinstance(json.loads(call.function.arguments)["on"], bool)


def test_what_a_client_got_it_may_send_back(client: OpenAI) -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}  # of the client's `parse`
    calls = [{"id": "c", "type": "function", "function": function, "index": 0}]
    for told in (
        {"content": "a", "reasoning": "b", "annotations": None, "refusal": None},
        {"content": None, "reasoning_content": "b", "tool_calls": calls},
        {"content": "{}", "parsed": {}},
    ):
        turns: Any = [*MESSAGES, {"role": "assistant", **told}, *MESSAGES]
        assert client.chat.completions.create(model=NAME, messages=turns, max_tokens=1).choices


def test_null_is_the_default(client: OpenAI) -> None:
    nulls = {"n": None, "stop": None, "seed": None, "logprobs": None, "max_tokens": 1}
    nulls |= {"stream_options": {"include_usage": None, "include_obfuscation": False}}
    nulls |= {"speculative": {"show_drafts": None, "show_trees": None}}
    completion = {"prompt": "a", "add_special_tokens": None, "best_of": 1, "echo": None}
    chat = {"messages": MESSAGES, "top_logprobs": 0, "tool_choice": None}
    for path, own in (("/completions", completion), ("/chat/completions", chat)):
        assert client.post(path, body=own | nulls, cast_to=object)


def test_a_second_turn_finds_the_first_in_the_prefix_cache(client: OpenAI, alone: LLM) -> None:
    messages: Any = [{"role": "user", "content": "a question of its own, " * 4}]
    keys: Any = {"model": NAME, "seed": 1, "max_tokens": 24}
    first = client.chat.completions.create(messages=messages, **keys)
    answer = first.choices[0].message.content
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    second = client.chat.completions.create(messages=messages, **keys)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 64 <= cached < second.usage.prompt_tokens
    (expected,) = alone.chat(messages, SamplingParams(seed=1, max_tokens=24))
    assert second.choices[0].message.content == expected.outputs[0].text


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, r"yes|no"),
        ({"extra_body": {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}}, r"\d{3}-[a-f]{2}"),
        ({"extra_body": {"guided_grammar": 'start: "a" "b"+'}}, r"ab+"),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
    ],
)
def test_the_form_of_an_answer_holds_whole_and_streamed(
    client: OpenAI, asked: dict[str, Any], pattern: str
) -> None:
    keys: Any = {"model": NAME, "messages": MESSAGES, "seed": 5, "max_tokens": 200}
    whole = client.chat.completions.create(**keys, **asked).choices[0]
    stream = client.chat.completions.create(stream=True, **keys, **asked)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert joined == whole.message.content
    if whole.finish_reason == "stop":
        assert re.fullmatch(pattern, joined, re.DOTALL)


def test_a_json_schema_is_kept_to(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "maximum": 9}, "on": {"type": "boolean"}},
        "required": ["size", "on"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    keys: Any = {"model": NAME, "messages": MESSAGES, "response_format": form, "max_tokens": 300}
    for seed in range(3):
        got = client.chat.completions.create(seed=seed, **keys).choices[0]
        if got.finish_reason == "stop":
            jsonschema.validate(json.loads(got.message.content or ""), schema)
    broken: Any = {"type": "json_schema", "json_schema": {"name": "s"}}
    with pytest.raises(openai.BadRequestError, match=r"json_schema\.schema"):
        client.chat.completions.create(**keys | {"response_format": broken})

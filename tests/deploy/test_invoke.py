"""Endpoints answer at once and as a stream; bench measures them like any other server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.deploy.invoke import EndpointRuntime
from peagle.http import LostError, RefusedError

from .aws_proxy import Refusal
from .conftest import Account

WORDS = ("Paris", " is", " the", " capital")
ANSWER = {"choices": [{"message": {"content": "".join(WORDS)}}], "usage": {"completion_tokens": 4}}


def sse(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunks() -> list[bytes]:
    """Server-sent events, cut anywhere, as SageMaker does."""
    deltas = [
        {"choices": [{"delta": {"content": word}, "token_ids": [n]}]}
        for n, word in enumerate(WORDS)
    ]
    usage = {"choices": [], "usage": {"completion_tokens": len(WORDS)}}
    stream = b"".join(sse(document) for document in [*deltas, usage]) + b"data: [DONE]\n\n"
    return [stream[n : n + 37] for n in range(0, len(stream), 37)]


@pytest.fixture
def answering(aws: Account) -> Account:
    aws.behaviour.parts = chunks()
    aws.behaviour.answer = json.dumps(ANSWER).encode()
    return aws


def test_an_answer_is_printed_as_it_comes(answering: Account) -> None:
    assert answering.verb("invoke", "oss", "Which city?", "--system", "Be short.") == 0
    assert answering.out == "".join(WORDS) + "\n"
    (asked,) = answering.behaviour.invocations
    assert asked["path"] == "/endpoints/oss/invocations-response-stream"
    assert asked["signature"].startswith("AWS4-HMAC-SHA256 Credential=AKIAEXAMPLE/")
    assert asked["stream"] is True
    assert [turn["role"] for turn in asked["messages"]] == ["system", "user"]


def test_an_answer_at_once_or_as_a_document(answering: Account) -> None:
    assert answering.verb("invoke", "oss", "Which city?", "--no-stream") == 0
    assert answering.out == "".join(WORDS) + "\n"
    assert answering.verb("invoke", "oss", "Which city?", "--json") == 0
    assert answering.json == ANSWER
    assert {a["path"] for a in answering.behaviour.invocations} == {"/endpoints/oss/invocations"}


def test_a_dry_run_asks_nothing(answering: Account) -> None:
    assert answering.verb("invoke", "oss", "Which city?", "--dry-run") == 0
    assert answering.json["body"]["messages"] == [{"role": "user", "content": "Which city?"}]
    assert answering.behaviour.calls == []


@pytest.mark.parametrize(
    ("code", "said", "http", "hint"),
    [
        ("ValidationError", "Endpoint oss of account 1 not found.", 404, "see `peagle deploy"),
        ("ThrottlingException", "slow down", 429, "AWS asks for fewer requests"),
        ("AccessDeniedException", "not authorized", 403, "`peagle deploy sagemaker plan` prints"),
        ("ValidationError", "a Token", 400, "see `peagle deploy sagemaker status oss`"),
    ],
)
def test_a_refusal_is_one_line(
    answering: Account, code: str, said: str, http: int, hint: str
) -> None:
    status = 403 if "Denied" in code else 400
    answering.behaviour.rules["InvokeEndpoint"] = [Refusal(code, said, status)]
    assert answering.verb("invoke", "oss", "hi", "--no-stream") == 2
    assert f"error: oss in us-east-1: HTTP {http}: {code}: {said}" in answering.err
    assert f"hint: {hint}" in answering.err


def test_what_the_container_refuses_is_its_own_answer(answering: Account) -> None:
    said = json.dumps({"error": {"message": "the prompt is too long", "code": 400}})
    more = {"OriginalStatusCode": 400, "OriginalMessage": said}
    answering.behaviour.rules["InvokeEndpoint"] = [Refusal("ModelError", "see logs", 424, more)]
    assert answering.verb("invoke", "oss", "hi", "--no-stream") == 2
    assert "HTTP 400: ModelError: the prompt is too long" in answering.err


def test_a_stream_that_breaks_off_is_said(answering: Account) -> None:
    runtime = EndpointRuntime("oss", "us-east-1")
    answering.behaviour.parts = [sse(ANSWER)]
    with pytest.raises(LostError, match="broke off"):
        list(runtime.events("", {}))
    answering.behaviour.breaks_off = True
    with pytest.raises(LostError, match="the connection was reset"):
        list(runtime.events("", {}))
    fatal = Refusal("ValidationError", "Endpoint oss of account 1 not found.")
    answering.behaviour.rules["InvokeEndpointWithResponseStream"] = [fatal]
    with pytest.raises(RefusedError) as caught:
        list(runtime.events("", {}))
    assert caught.value.is_fatal


def test_bench_measures_an_endpoint(answering: Account, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = ("org/m", "--backend", "sagemaker:us-east-1/oss", "--out", str(out))
    words += ("--num-prompts", "2", "--repeats", "1", "--warmup", "0", "--concurrency", "2")
    words += ("--spec-method", "p-eagle", "--spec-tokens", "7", "--answers-per-stream", "1")
    assert answering("bench", *words, "--json") == 0, answering.err
    (cell,) = answering.json["cells"]
    (run,) = cell["repeats"]
    assert (cell["method"], cell["num_speculative_tokens"]) == ("p-eagle", 7)
    assert run["num_output_tokens"] == len(WORDS) * run["num_requests"]
    assert run["errors"] == []
    asked = answering.behaviour.invocations[0]
    assert asked["path"] == "/endpoints/oss/invocations-response-stream"
    assert asked["return_token_ids"] is True
    assert "model" not in asked, "vLLM's only model needs no name"


def test_bench_says_when_there_is_no_such_endpoint(answering: Account, tmp_path: Path) -> None:
    missing = Refusal("ValidationError", "Endpoint oss of account 1 not found.")
    answering.behaviour.rules["InvokeEndpointWithResponseStream"] = [missing] * 4
    words = ("bench", "org/m", "--backend", "sagemaker:oss", "--out", str(tmp_path / "r"))
    assert answering(*words, "--num-prompts", "1", "--repeats", "1") == 2
    assert "not found" in answering.err
    assert answering("bench", "org/m", "--backend", "sagemaker:", "--out", str(tmp_path)) == 2
    assert "no endpoint is named" in answering.err

"""Answers from an endpoint: token ids both ways, retries, and errors that say whose they are."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.errors import ConfigError, DataError
from peagle.http import Endpoint
from peagle.prepare.answers import Question, TargetAnswer
from peagle.prepare.endpoint import EndpointAnswers
from peagle.sampling_params import SamplingParams

from .endpoint_server import Behaviour, Reply, completion, serving

PARAMS = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7)


def ask(
    behaviour: Behaviour, count: int = 1, retries: int = 2
) -> tuple[list[TargetAnswer], list[Any]]:
    with serving(behaviour) as (url, requests):
        endpoint = Endpoint(url + "/v1", "served", "secret", retries, 5.0, first_wait=0.001)
        source = EndpointAnswers(endpoint, PARAMS, concurrency=4)
        questions = [Question([n, n + 1], seed=2**40 + n) for n in range(count)]
        answers: dict[Question, TargetAnswer] = {}
        try:
            for question in questions:
                source.submit(question)
            while len(answers) < count:
                answers.update(source.collect())
        finally:
            source.close()
    return [answers[q] for q in questions], requests


def test_prompts_go_and_answers_come_as_token_ids() -> None:
    answers, requests = ask(lambda body: completion([body["prompt"][0], 9], "length"), count=10)
    assert answers == [TargetAnswer([n, 9], clipped=True) for n in range(10)]
    first = next(r for r in requests if r["prompt"] == [0, 1])
    assert first["path"] == "/v1/completions"
    assert first["key"] == "Bearer secret"
    assert (first["model"], first["max_tokens"], first["return_token_ids"]) == ("served", 7, True)
    assert (first["temperature"], first["top_p"]) == (0.5, 0.9)
    assert 0 <= first["seed"] < 2**31
    assert "top_k" not in first


def test_a_busy_server_is_asked_again() -> None:
    replies: list[Reply] = [(503, {}), (429, {}), completion([4])]
    answers, requests = ask(lambda body: replies.pop(0))
    assert answers == [TargetAnswer([4])]
    assert len(requests) == 3


def test_a_refused_question_fails_alone() -> None:
    answers, _ = ask(lambda body: (400, {"error": {"message": "prompt too long"}}))
    assert answers == [TargetAnswer([], error="HTTP 400: prompt too long")]
    answers, _ = ask(lambda body: completion([]))
    assert answers[0].error is not None
    answers, _ = ask(lambda body: (200, {"choices": []}))
    assert "no completion" in str(answers[0].error)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((404, {"message": "no model"}), "HTTP 404: no model"),
        ((500, {}), "HTTP 500"),
        ((200, {"choices": [{"text": "only text"}]}), "have no token_ids"),
    ],
)
def test_what_would_fail_every_row_ends_the_run(reply: Reply, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(lambda body: reply)


def test_a_server_that_is_not_there_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda body: completion([1])) as (url, _):
        pass
    source = EndpointAnswers(Endpoint(url, "m", retries=1, first_wait=0.001), PARAMS, 1)
    source.submit(Question([1], 0))
    with pytest.raises(DataError, match="returns no answers"):
        source.collect()
    source.close()
    assert "trying again" in caplog.text, "nobody waits in silence"


def test_an_address_needs_its_scheme() -> None:
    with pytest.raises(ConfigError):
        Endpoint("localhost:8000", "m")

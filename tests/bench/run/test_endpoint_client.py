"""Any OpenAI-compatible server: streamed answers, and servers that go away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from peagle.bench.run.driver import Load, Outcome, drive
from peagle.bench.run.endpoint_client import EndpointClient, find_model
from peagle.bench.run.measure import measure
from peagle.bench.run.null_backend import NullTokenizer
from peagle.bench.run.server_metrics import difference, parse_metrics
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError, ConfigError
from peagle.http import Endpoint
from peagle.sampling_params import SamplingParams

from .sse_server import Behaviour, serving

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, seed=1)
PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of drafts
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} %d.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
"""


@pytest.fixture
def server() -> Iterator[tuple[Behaviour, str]]:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        yield behaviour, url


def ask(url: str, tasks: int = 3, streams: int = 2, turns: int = 1, **options: Any) -> Outcome:
    endpoint = find_model(Endpoint(url), "m")
    work = [Task(f"t{n}", tuple("xyz"[:turns])) for n in range(tasks)]
    load = Load(concurrency=streams)
    return drive(EndpointClient(endpoint, **options), work, load, lambda task, turn: PARAMS)


def test_streamed_answers_bring_ids_text_and_times(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    outcome = ask(url, turns=2)
    assert len(outcome.records) == 6
    for record in outcome.records:
        assert record.answer is not None
        assert record.answer.token_ids == [1, 2, 3, 4]
        assert record.answer.text == "<1><2><3><4>"
        assert record.counts == [1, 3, 4]
        assert record.times == sorted(record.times)
    asked = behaviour.requests[0]
    assert asked["path"] == "/v1/chat/completions"
    assert asked["return_token_ids"] is True
    assert asked["stream_options"] == {"include_usage": True}
    later = [r["messages"] for r in behaviour.requests if len(r["messages"]) > 1]
    assert len(later) == 3
    assert later[0][1] == {"role": "assistant", "content": "<1><2><3><4>"}
    assert measure(outcome).num_output_tokens == 24


def test_connections_are_kept_between_requests(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    ask(url, tasks=6, streams=1)
    assert behaviour.num_connections == 2  # one for the list of models


def test_server_without_token_ids_counts_by_its_usage(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    behaviour.owner, behaviour.token_ids = "somebody", False
    outcome = ask(url, tasks=1)
    (record,) = outcome.records
    assert record.answer is not None
    assert record.answer.token_ids is None
    assert record.answer.num_tokens == 4
    assert len(record.times) == 3  # the usage is no chunk
    assert "return_token_ids" not in behaviour.requests[0]
    assert measure(outcome).num_output_tokens == 4


def test_server_without_usage_counts_chunks(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    behaviour.owner, behaviour.token_ids, behaviour.usage = "somebody", False, False
    assert measure(ask(url, tasks=1)).num_output_tokens == 3


def test_raw_prompts_and_token_ids_go_to_completions(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    ask(url, tasks=1, raw=True)
    assert (behaviour.requests[0]["path"], behaviour.requests[0]["prompt"]) == (
        "/v1/completions",
        "x",
    )
    client = EndpointClient(Endpoint(url), tokenizer=NullTokenizer())
    path, prompt = client.prompt(Task("s", num_random_tokens=5), ())
    assert (path, len(prompt["prompt"])) == ("/v1/completions", 5)
    with pytest.raises(ConfigError, match="vocabulary"):
        EndpointClient(Endpoint(url)).prompt(Task("s", num_random_tokens=5), ())


def test_endpoint_that_is_down_is_one_line() -> None:
    with pytest.raises(BackendError, match="gives no answer") as caught:
        find_model(Endpoint("http://127.0.0.1:9"), "m")
    assert caught.value.hint


def test_something_else_at_the_address_is_said(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    behaviour.models = ()
    with pytest.raises(BackendError, match="does not serve 'm'"):
        find_model(Endpoint(url), "m")
    behaviour.models = ("a", "b")
    with pytest.raises(BackendError, match="does not serve 'm'") as caught:
        find_model(Endpoint(url), "m")
    assert "a, b" in str(caught.value.hint)


def test_only_model_of_a_server_needs_no_name(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    behaviour.models = ("served-name",)
    assert find_model(Endpoint(url + "/v1/"), "/a/folder").model == "served-name"


def test_server_that_dies_mid_answer_ends_the_run(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    behaviour.dies_after = 1
    outcome = ask(url)
    assert isinstance(outcome.failure, BackendError)
    assert "the answer broke off" in str(outcome.failure)
    assert measure(outcome).partial


def test_server_that_hangs_up_at_once_ends_the_run(server: tuple[Behaviour, str]) -> None:
    behaviour, url = server
    endpoint = find_model(Endpoint(url), "m")
    behaviour.dead = True
    client = EndpointClient(endpoint)
    outcome = drive(client, [Task("t", ("x",))], Load(concurrency=1), lambda task, turn: PARAMS)
    assert isinstance(outcome.failure, BackendError)
    assert len(behaviour.requests) == 2  # a stale connection is tried once more


@pytest.mark.parametrize(("status", "ends"), [(401, True), (404, True), (500, False), (400, False)])
def test_refusals_end_the_run_only_if_every_request_would_get_them(
    server: tuple[Behaviour, str], status: int, ends: bool
) -> None:
    behaviour, url = server
    behaviour.status = status
    outcome = ask(url)
    assert (outcome.failure is not None) == ends
    run = measure(outcome)
    assert run.partial == (status != 400)  # what the prompt itself is refused for stays so
    assert f"HTTP {status}: no such thing" in run.errors[-1]


def test_acceptance_is_the_difference_of_the_servers_counters() -> None:
    before, after = (
        parse_metrics(PAGE % (10, 20, 9, 6, 3)),
        parse_metrics(PAGE % (30, 60, 29, 18, 11)),
    )
    stats = difference(before, after)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (20, 40, 20)
    assert stats.num_accepted_tokens_per_pos == [12, 8]
    assert stats.mean_acceptance_length == 2.0
    assert stats.per_position_acceptance == [0.6, 0.4]
    assert stats.conditional_acceptance == pytest.approx([0.6, 8 / 12])


def test_page_without_these_counters_says_nothing() -> None:
    assert parse_metrics("process_cpu_seconds_total 1.0\n") is None
    assert difference(None, None).num_drafts == 0


def test_server_that_was_started_anew_meanwhile_counts_nothing() -> None:
    before, after = (
        parse_metrics(PAGE % (30, 60, 29, 18, 11)),
        parse_metrics(PAGE % (1, 2, 1, 1, 0)),
    )
    assert difference(before, after).num_drafts == 0

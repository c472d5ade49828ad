"""Claim: what /metrics counts is what the engine counted, in words that readers of vLLM's know."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from peagle.bench.run.endpoint_client import find_model
from peagle.bench.run.server_metrics import difference, read_metrics
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.http import Endpoint
from peagle.server.engine_loop import warm_llm

from .running import NAME, RunningServer

BODY = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "seed": 1}


def test_bench_reads_the_server_as_one_of_vllm(server: RunningServer) -> None:
    endpoint = find_model(Endpoint(server.url), NAME)
    assert endpoint.shows_token_ids
    before = read_metrics(endpoint)
    with server.client() as client:
        answers = [client.post("/v1/completions", json=BODY | {"n": 2}).json() for _ in range(2)]
    counted = difference(before, read_metrics(endpoint))
    told = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert counted.num_drafts == sum(one["num_drafts"] for one in told) > 0
    assert counted.num_draft_tokens == sum(one["num_draft_tokens"] for one in told)
    assert counted.num_accepted_tokens == sum(one["num_accepted_tokens"] for one in told)
    assert read_metrics(endpoint).num_drafts == server.llm.stats.num_drafts


def test_tokens_and_times_are_counted_once_per_request(server: RunningServer) -> None:
    def values() -> dict[str, float]:
        with server.client() as client:
            page = client.get("/metrics").text
        found = [s for family in text_string_to_metric_families(page) for s in family.samples]
        return {s.name: s.value for s in found}

    before, encode = values(), server.llm.get_tokenizer().encode
    with server.client() as client:
        for stream in (False, True, True):
            client.post("/v1/completions", json=BODY | {"stream": stream})
    after = values()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:generation_tokens_total"] == 3 * 40
    assert grown["vllm:prompt_tokens_total"] == 3 * len(encode("abc"))
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        assert grown[f"vllm:{name}_seconds_count"] == 3
    assert grown["vllm:e2e_request_latency_seconds_sum"] > 0
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_methods_that_nobody_serves_add_no_series(server: RunningServer) -> None:
    unusual = ("PROPFIND", "MKCOL", "UNLOCK")
    with server.client() as client:
        for method in unusual:
            assert client.request(method, "/health").status_code == 405
        assert client.request("MADE-UP", "/health").status_code in (400, 405)  # as parsed
        page = client.get("/metrics").text
    assert 'method="other"' in page
    assert not any(method in page for method in (*unusual, "MADE-UP"))


def test_warming_up_is_not_counted(model_folder: Path, head_folder: Path) -> None:
    drafter = SpeculativeConfig.from_mapping({"model": str(head_folder)})
    llm = warm_llm(str(model_folder), EngineConfig(device="cpu", max_num_seqs=2), drafter)
    assert llm.stats.num_steps == llm.stats.num_output_tokens == 0
    assert llm.stats.num_accepted_tokens_per_pos == []

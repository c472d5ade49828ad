"""Prometheus counters and histograms. Names and labels are vLLM's where vLLM has them, so that its
dashboards and `peagle bench` read both; what only we have begins with `peagle:`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from peagle.outputs import FinishReason
from peagle.server.async_llm import AsyncLLM, Generation
from peagle.server.engine_loop import RequestNews

# Seconds, from a GPU's steps to a CPU's long answers.
SHORT = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LONG = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
COUNTS = (1, 2, 5, 10, 20)
METHODS = ("GET", "HEAD", "POST", "OPTIONS")


class ServerMetrics:
    """Of one API server. `shared` is a folder where several of them keep their figures: the page of
    each shows the sums."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model: str, shared: Path | None = None) -> None:
        self.registry = self._shown = CollectorRegistry()
        if shared is not None:
            self._shown = _registry_of_all(shared)
        self._labels = {"model_name": model, "engine": "0"}
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.")
        self.num_preemptions = self._counter("vllm:num_preemptions", "Preempted requests.")
        success = Counter(
            "vllm:request_success",
            "Answers by how they ended.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._success = {
            reason: success.labels(**self._labels, finished_reason=reason)
            for reason in get_args(FinishReason)
        }
        seconds = (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", SHORT),
            ("vllm:inter_token_latency_seconds", "Between two reports of tokens, each.", SHORT),
            ("vllm:request_time_per_output_token_seconds", "Per token after the first.", SHORT),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", LONG),
            ("vllm:request_decode_time_seconds", "First to last token.", LONG),
        )
        tokens = (
            ("vllm:request_prompt_tokens", "Tokens of a request's prompts.", TOKENS),
            ("vllm:request_generation_tokens", "Tokens of a request's answers.", TOKENS),
            ("vllm:request_params_n", "n of a request.", COUNTS),
            ("vllm:request_params_max_tokens", "max_tokens of a request.", TOKENS),
        )
        self._histograms = {
            name: self._histogram(name, text, buckets)
            for name, text, buckets in (*seconds, *tokens)
        }
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests by handler, method and status.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Until the end of the answer.",
            ["handler", "method"],
            buckets=LONG,
            registry=self.registry,
        )

    def watch(self, llm: AsyncLLM) -> None:
        """Shows the engine's own figures, too."""
        self._shown.register(EngineCollector(llm, self._labels))

    def page(self) -> bytes:
        return generate_latest(self._shown)

    def count(self, num_tokens: int) -> None:
        self.generation_tokens.inc(num_tokens)

    def tokens(self, generation: Generation, now: float) -> None:
        """Tokens of a request came just now."""
        if generation.last_token_at is None:
            self.prompt_tokens.inc(generation.num_prompt_tokens)
            generation.first_token_at = now
            self._add("vllm:time_to_first_token_seconds", now - generation.arrived)
        else:
            self._add("vllm:inter_token_latency_seconds", now - generation.last_token_at)
        generation.last_token_at = now

    def end(self, generation: Generation, news: RequestNews, now: float) -> None:
        """Of answers, and with the last of them of a request."""
        for answer in news.answers:
            if answer.finish_reason is not None:
                self._success[answer.finish_reason].inc()
        if not generation.num_unfinished:
            self._end_request(generation, now)

    def _end_request(self, generation: Generation, now: float) -> None:
        params, num_tokens = generation.params, generation.num_output_tokens
        self.num_preemptions.inc(generation.num_preemptions)
        self._add("vllm:e2e_request_latency_seconds", now - generation.arrived)
        self._add("vllm:request_prompt_tokens", generation.num_prompt_tokens)
        self._add("vllm:request_generation_tokens", num_tokens)
        self._add("vllm:request_params_n", params.n)
        if params.max_tokens is not None:
            self._add("vllm:request_params_max_tokens", params.max_tokens)
        if generation.first_token_at is not None:
            decode = now - generation.first_token_at
            self._add("vllm:request_decode_time_seconds", decode)
            if num_tokens > 1:
                per_token = decode / (num_tokens - 1)
                self._add("vllm:request_time_per_output_token_seconds", per_token)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A method that no route has is not named: a client may make up as many as it likes."""
        method = method if method in METHODS else "other"
        self._http_requests.labels(handler, method, str(status)).inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(
            **self._labels
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = list(self._labels)
        made = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
        return made.labels(**self._labels)


def _registry_of_all(folder: Path) -> CollectorRegistry:
    """What is counted from now on in this process lies in files of the folder, where every process
    finds it. The client library asks its environment, once, when it is imported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry


class EngineCollector(Collector):
    """The engine's figures as it last reported them; nothing is counted twice."""

    def __init__(self, llm: AsyncLLM, labels: dict[str, str]) -> None:
        self._llm, self._names, self._values = llm, list(labels), list(labels.values())

    def collect(self) -> Iterator[Metric]:
        status, ready = self._llm.status, self._llm.ready
        if ready is None:
            return
        used = 1 - status.num_free_blocks / ready.num_blocks if ready.num_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Answers in steps.", status.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait.", status.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use.", used)
        yield self._count(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            status.num_prefix_queries,
        )
        yield self._count(
            "vllm:prefix_cache_hits",
            "Prompt tokens that the prefix cache had.",
            status.num_prefix_hits,
        )
        stats, prefix = status.stats, "vllm:spec_decode_"
        yield self._count(f"{prefix}num_drafts", "Steps with drafts.", stats.num_drafts)
        yield self._count(f"{prefix}num_draft_tokens", "Draft tokens.", stats.num_draft_tokens)
        yield self._count(
            f"{prefix}num_accepted_tokens", "Accepted draft tokens.", stats.num_accepted_tokens
        )
        positions = CounterMetricFamily(
            f"{prefix}num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            labels=[*self._names, "position"],
        )
        for position, accepted in enumerate(stats.num_accepted_tokens_per_pos):
            positions.add_metric([*self._values, str(position)], accepted)
        yield positions

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _count(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

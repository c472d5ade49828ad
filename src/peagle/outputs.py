"""What a caller gets back: vLLM's shapes, so that one script reads both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from peagle.speculation.statistics import SpecDecodeStats

# "stop": end-of-sequence, stop id or stop string; "length": max_tokens or the context is full;
# "abort": cancelled; "error": see CompletionOutput.error.
FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str


@dataclass
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class Metric:
    """A figure since the engine's start, under vLLM's name for it."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Gauge(Metric):
    value: float  # rises and falls


@dataclass
class Vector(Metric):
    values: list[int]  # counters by draft position


@dataclass
class RequestMetrics:
    """Wall-clock marks of one request, in seconds on the monotonic clock."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """All answers to one prompt; `stats` and `metrics` sum over its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0  # those of the prompt that the prefix cache had

"""One point of a grid: its repeats and their figures. Part of results.py's document.

Times are seconds; None where a figure is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.bench.intervals import Interval, t_interval


@dataclass(frozen=True)
class Quantiles:
    p50: float
    p95: float
    p99: float
    mean: float


@dataclass(frozen=True)
class Latencies:
    """`ttft`: until the first token; `tpot`: per token after the first, one value a request;
    `itl`: between two chunks of tokens, one value a pair of chunks; `e2el`: the whole answer.
    With a request rate all count from the scheduled arrival. None: nothing to take it from."""

    ttft: Quantiles | None = None
    tpot: Quantiles | None = None
    itl: Quantiles | None = None
    e2el: Quantiles | None = None


@dataclass(frozen=True)
class Category:
    """The share of a run that one category of prompts had."""

    num_requests: int
    num_output_tokens: int
    acceptance_length: float | None = None  # None: nothing was drafted, or it is not known


@dataclass(frozen=True)
class Run:
    """One repeat of one cell. `stats` is SpecDecodeStats.as_dict(): counters, the derived
    acceptance figures, and draft_time, verify_time and other_time; empty where the backend shows
    none. `partial`: it was cut short or a request failed; `errors` says why."""

    otps: float  # output tokens per second over `wall_s`
    latencies: Latencies
    num_requests: int  # those that were answered
    num_output_tokens: int
    wall_s: float  # from the first start (or scheduled arrival) to the last token
    # The same until the last conversation began, while all streams are busy: the whole run ends in
    # a tail in which fewer run. None in an open loop, and with no more prompts than streams.
    steady_otps: float | None = None
    num_repeated: int = 0  # conversations that asked a prompt of this run again
    num_compiled: int = 0  # what the backend had to make during it, such as CUDA graphs
    stats: dict[str, Any] = field(default_factory=dict)
    looping_share: float | None = None  # of the answers
    acceptance_without_looping: float | None = None  # mean acceptance length
    peak_memory_bytes: int | None = None
    gpu_utilization: float | None = None  # 0 to 1
    categories: dict[str, Category] = field(default_factory=dict)
    partial: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification step; None if nothing was drafted or it is not known."""
        if not self.stats.get("num_drafts"):
            return None
        return float(self.stats["mean_acceptance_length"])


@dataclass(frozen=True)
class Summary:
    """Over a cell's whole repeats (partial ones are left out where a whole one exists)."""

    otps: Interval
    steady_otps: float | None
    num_repeats: int
    acceptance_length: float | None
    acceptance_without_looping: float | None
    partial: bool


@dataclass(frozen=True)
class Cell:
    """One point of the grid. Exactly one of `concurrency` and `request_rate` is set."""

    method: str  # none, ngram, eagle3, p-eagle; for an endpoint: what the user calls it
    num_speculative_tokens: int  # 0 for none
    workload: str
    concurrency: int | None = None
    request_rate: float | None = None  # requests per second
    head: str | None = None  # the head's reference, as in Manifest.heads
    repeats: list[Run] = field(default_factory=list)

    @property
    def label(self) -> str:
        """`p-eagle`; the same name for every K."""
        return self.method if self.head is None else f"{self.method} ({Path(self.head).name})"

    @property
    def load(self) -> str:
        return f"{self.concurrency}" if self.concurrency else f"{self.request_rate:g}/s"

    def summary(self) -> Summary | None:
        """None before the first repeat."""
        whole = [run for run in self.repeats if not run.partial]
        runs = whole or self.repeats
        if not runs:
            return None
        return Summary(
            otps=t_interval([run.otps for run in runs]),
            steady_otps=_mean([run.steady_otps for run in runs]),
            num_repeats=len(runs),
            acceptance_length=_mean([run.acceptance_length for run in runs]),
            acceptance_without_looping=_mean([r.acceptance_without_looping for r in runs]),
            partial=not whole,
        )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""What HTTP alone carries: tokens/s and CPU time of API servers, by an engine that costs nothing.

    python benchmarks/http_capacity.py --api-server-count 1 4 --streams 64 --out ...

The engine is a clock: every open answer gets so many tokens per tick, as from a GPU's steps. All
else is what `peagle serve` runs: channels, API servers, tokenizer. The clients compete for the same
cores; CPU time per token does not depend on that, tokens/s do. Needs no GPU and no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import multiprocessing
import os
import pstats
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server_cost import Clients, Setting, cpu_seconds, figures, server_pids

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.engine.prompts import TokenizedPrompt
from peagle.files import write_json
from peagle.http import is_healthy
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams
from peagle.server.config import ServerConfig
from peagle.server.engine_loop import run_engine
from peagle.server.serving import ApiServerSetup, listen, serve_http, started_engine
from peagle.speculation.statistics import SpecDecodeStats

TEXT = "The answer to your question is that it depends, as most things do. "


@dataclass
class Clock:
    """When tokens come."""

    steps_per_second: float
    tokens_per_step: int


@dataclass(eq=False)
class FakeAnswers:
    """What EngineLoop reads of PromptAnswers, with one answer."""

    prompt_token_ids: list[int]
    max_tokens: int
    token_ids: list[int] = field(init=False)
    logprobs: list[Any] = field(default_factory=list)
    finished: bool = False
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    num_cached_tokens = num_preemptions = 0
    finish_reason = stop_reason = error = stop_string = draft_trees = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.request, self.answers = self, [self]

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


class FakeLLM:
    """What EngineLoop calls of LLM."""

    method, num_speculative_tokens = "none", 0

    def __init__(self, text: list[int], vocab_size: int, clock: Clock) -> None:
        self._text, self._clock, self._next = text, clock, time.monotonic()
        self._open: dict[FakeAnswers, None] = {}
        self.stats = SpecDecodeStats()
        self.engine = SimpleNamespace(
            max_model_len=1 << 20,
            target=SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size)),
            scheduler=SimpleNamespace(
                max_num_seqs=1 << 16,
                running=self._open,
                waiting=(),
                prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
            ),
            allocator=SimpleNamespace(num_blocks=1, block_size=16, num_free=1),
        )

    def add_request(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, keeps_trees: bool
    ) -> FakeAnswers:
        answers = FakeAnswers(prompt.token_ids, params.max_tokens or 16)
        self._open[answers] = None
        return answers

    def abort_request(self, answers: FakeAnswers) -> None:
        self._open.pop(answers, None)

    def step(self) -> list[FakeAnswers]:
        if not self._open:
            return []
        self._next = max(self._next + 1 / self._clock.steps_per_second, time.monotonic() - 0.05)
        time.sleep(max(0.0, self._next - time.monotonic()))
        changed = list(self._open)
        for answers in changed:
            at = answers.num_outputs
            count = min(self._clock.tokens_per_step, answers.max_tokens - at)
            answers.token_ids += [self._text[(at + n) % len(self._text)] for n in range(count)]
            if answers.num_outputs == answers.max_tokens:
                answers.finish_reason, answers.finished = "length", True  # type: ignore[assignment]
                del self._open[answers]
        return changed


def fake_engine(connections: Sequence[Connection], folder: str, clock: Clock) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tokenizer = load_tokenizer(Path(folder))
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    size = len(tokenizer)
    run_engine(connections, lambda: FakeLLM(text, size, clock))  # type: ignore[arg-type,return-value]


def server_process(told: Connection, model: str, count: int, clock: Clock, profiled: bool) -> None:
    """API servers before the clock; the first one is this process."""
    folder = resolve_model(model)
    config = ServerConfig(port=0, log_requests=False, max_waiting_requests=1 << 16)
    profile = cProfile.Profile(time.thread_time) if profiled else contextlib.nullcontext()
    listener = listen(config.host, 0)
    told.send(listener.getsockname()[1])
    with listener, started_engine(count, fake_engine, str(folder), clock) as channels, profile:
        serve_http(
            ApiServerSetup([model], folder, config, None), listener, channels, lambda text: None
        )
    if isinstance(profile, cProfile.Profile):
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


@contextlib.contextmanager
def running(args: argparse.Namespace, count: int) -> Iterator[tuple[int, int]]:
    """-> port and process id."""
    ours, theirs = multiprocessing.Pipe()
    clock = Clock(args.steps_per_second, args.tokens_per_step)
    context = multiprocessing.get_context("spawn")
    words = (theirs, args.model, count, clock, args.profile)
    process = context.Process(target=server_process, args=words)
    process.start()
    try:
        port = ours.recv()
        while not is_healthy(f"http://127.0.0.1:{port}/health"):
            time.sleep(0.1)
        assert process.pid is not None
        yield port, process.pid
    finally:
        process.terminate()
        process.join(60)


def measure(port: int, pid: int, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    clients, rounds = Clients(args.streams), []
    bodies = [setting.body(n) for n in range(args.requests or 3 * args.streams)]
    servers = server_pids(pid).api_servers
    for repeat in range(args.repeats + 1):  # the first warms up
        before = [cpu_seconds(server) for server in servers]
        records = clients.run(port, bodies)
        spent = [cpu_seconds(server) - b for server, b in zip(servers, before, strict=True)]
        num_tokens = sum(r.num_tokens for r in records)
        one = figures(records) | {"cpu_us_per_token": sum(spent) / num_tokens * 1e6}
        one["cpu_us_per_request"] = sum(spent) / len(records) * 1e6
        one["busiest_share"] = max(spent) / max(sum(spent), 1e-9)
        if repeat:
            rounds.append(one)
    clients.close()
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0, help="default: 3 for each stream")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=int, default=3)
    parser.add_argument("--steps-per-second", type=float, default=170.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="of the first API server")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setting, cells = Setting(args.model, None, args.max_tokens, ()), []
    for count in args.api_server_count:
        with running(args, count) as (port, pid):
            cells.append({"api_server_count": count} | measure(port, pid, setting, args))
    if args.out:
        write_json(args.out, {"provenance": provenance(probe_torch=False), "cells": cells})
    offered = args.streams * args.tokens_per_step * args.steps_per_second
    print(json.dumps({"offered_tokens_per_second": offered, "cells": cells}))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()

"""The embedded engine on a GPU: plain, P-EAGLE and EAGLE-3 by K and concurrency, in one run.

    python benchmarks/engine_gpu.py --prompts humaneval.jsonl mt_bench.jsonl --out FILE

A closed loop keeps `concurrency` requests in flight over the same prompts, greedy, up to 256 new
tokens. Rounds are interleaved: each goes through all methods before the next begins. The first
round is a warm-up in which graphs are captured. Output tokens per second include prefill, host
work and the tail in which fewer requests run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.checkpoints.targets import eos_token_ids, load_target
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.data.prompts import read_prompts
from peagle.engine.engine import Engine
from peagle.engine.loading import load_speculation
from peagle.engine.prompts import PromptReader
from peagle.files import write_json
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats


@dataclass
class Cell:
    method: str
    depth: int
    concurrency: int
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    without_loops: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    device_idle_share: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def record(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "K": self.depth,
            "concurrency": self.concurrency,
            "tokens_per_s": self.rate,
            "slowest_and_fastest": [
                self.tokens / max(self.seconds),
                self.tokens / min(self.seconds),
            ],
            "tokens": self.tokens,
            "mean_acceptance_length": self.stats.mean_acceptance_length,
            "without_looping": self.without_loops.mean_acceptance_length,
            "per_position_acceptance": self.stats.per_position_acceptance,
            "device_idle_share": statistics.median(self.device_idle_share),
        }


def closed_loop(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int
) -> tuple[list[Any], float, float]:
    """-> the requests in order, seconds, and the share of them in which the device was idle."""
    requests: list[Any] = []
    waiting = iter(prompts)
    busy_before = _busy(engine)
    begun = perf_counter()
    running = _submit(engine, waiting, params, requests, concurrency)
    while running:
        news = engine.step()
        ended = sum(new.request.finish_reason is not None for new in news)
        running += _submit(engine, waiting, params, requests, ended) - ended
    seconds = perf_counter() - begun
    return requests, seconds, 1.0 - (_busy(engine) - busy_before) / seconds


def _busy(engine: Engine) -> float:
    return engine.stats.draft_time + engine.stats.verify_time


def _submit(
    engine: Engine,
    waiting: Iterator[list[int]],
    params: SamplingParams,
    requests: list[Any],
    n: int,
) -> int:
    count = 0
    for _, prompt in zip(range(n), waiting, strict=False):
        requests.append(engine.add_request(str(len(requests)), prompt, params))
        count += 1
    return count


def prompt_tokens(files: list[str], folder: Path) -> list[list[int]]:
    """First turns, as the target's chat template writes them."""
    reader = PromptReader(load_tokenizer(folder))
    prompts = []
    for file in files:
        for conversation in read_prompts(file).good:
            messages = [{"role": "user", "content": conversation.turns[0]}]
            prompts.append(reader.render_chat(messages)["prompt_token_ids"])
    random.Random(0).shuffle(prompts)  # the few that one request at a time gets are a mix too
    return prompts


def run_cell(
    cell: Cell, engine: Engine, prompts: list[list[int]], args: argparse.Namespace
) -> None:
    count = max(args.waves * cell.concurrency, args.least)
    chosen = [prompts[n % len(prompts)] for n in range(count)]
    params = SamplingParams(
        temperature=args.temperature,
        seed=0 if args.temperature else None,
        max_tokens=args.max_tokens,
        num_speculative_tokens=cell.depth or None,
    )
    requests, seconds, device_idle_share = closed_loop(engine, chosen, params, cell.concurrency)
    cell.seconds.append(seconds)
    cell.device_idle_share.append(device_idle_share)
    cell.tokens = sum(r.num_outputs for r in requests)
    cell.answers = [r.output_token_ids for r in requests]
    cell.stats, cell.without_loops = SpecDecodeStats(), SpecDecodeStats()
    for request in requests:
        cell.stats.merge(request.stats)
        if not is_looping(request.output_token_ids):
            cell.without_loops.merge(request.stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--head", nargs="*", default=["smollm2-135m-p-eagle", "smollm2-135m-eagle3"]
    )
    parser.add_argument("--prompts", nargs="+", required=True, help="jsonl files")
    parser.add_argument("--depths", type=int, nargs="+", default=[3, 5, 7, 11])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--least", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    folder = resolve_model(args.model)
    prompts = prompt_tokens(args.prompts, folder)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(folder, dtype=dtype, device=device).requires_grad_(False)
    config = EngineConfig(max_num_seqs=max(args.concurrency), max_model_len=args.max_model_len)
    engines: dict[str, Engine] = {}
    cells = []
    for head in [None, *args.head]:
        wanted = SpeculativeConfig(model=head, num_speculative_tokens=max(args.depths))
        speculation = load_speculation(wanted, target) if head else None
        name = speculation.drafter.method if speculation else "none"
        engines[name] = Engine(
            target, config, eos_token_ids=eos_token_ids(folder), speculation=speculation
        )
        deepest = speculation.drafter.max_speculative_tokens if speculation else 0
        depths = [k for k in args.depths if k <= deepest] if speculation else [0]
        cells += [Cell(name, k, c) for k in depths for c in args.concurrency]
    for number in range(1 + args.rounds):
        for cell in cells:
            run_cell(cell, engines[cell.method], prompts, args)
            if number == 0:  # graphs were captured in it
                cell.seconds, cell.device_idle_share = [], []
    report(cells, args)


def report(cells: list[Cell], args: argparse.Namespace) -> None:
    plain = {c.concurrency: c for c in cells if c.method == "none"}
    records = []
    for cell in cells:
        base = plain[cell.concurrency]
        pairs = zip(cell.answers, base.answers, strict=True)
        same = sum(a == b for a, b in pairs) / len(cell.answers)
        record = cell.record() | {"over_plain": cell.rate / base.rate, "same_answers": same}
        records.append(record)
        print(
            f"{cell.method:8} K={cell.depth:2} c={cell.concurrency:3} {cell.rate:9.0f} tokens/s "
            f"{cell.rate / base.rate:5.2f}x  AL {cell.stats.mean_acceptance_length:.2f} "
            f"({cell.without_loops.mean_acceptance_length:.2f}) "
            f"idle {record['device_idle_share']:.1%} same {same:.0%}",
            flush=True,
        )
    workload = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    workload["prompts"] = [Path(p).name for p in args.prompts]
    document = {"cells": records, "workload": workload, "provenance": provenance(probe_torch=True)}
    if args.out:
        write_json(args.out, document)
    print(json.dumps({"cells": len(records)}))


if __name__ == "__main__":
    main()

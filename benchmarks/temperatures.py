"""What trees of drafts gain over chains at several temperatures, in accepted tokens per step.

    python benchmarks/temperatures.py --prompts mt_bench.jsonl --num-prompts 20 --out FILE

Verification is coupled: the noise of an output position does not depend on how it is drafted, so
every setting writes the same answers, and the lengths compare drafts over the same text. The device
is a GPU where there is one. Acceptance does not depend on the machine's load or speed; no times are
taken.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine_gpu import prompt_tokens

from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import eos_token_ids
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.engine import Engine
from peagle.engine.loading import load_engine_target, load_speculation
from peagle.engine.request import Request
from peagle.files import write_json
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats

RESAMPLES = 2000  # of the prompts, for an interval


class Drafts(NamedTuple):
    """How a step drafts: a chain of K, or a tree of N nodes that is at most K deep."""

    depth: int
    num_nodes: int | None = None

    @property
    def name(self) -> str:
        return f"K={self.depth}" if self.num_nodes is None else f"N={self.num_nodes}"


@dataclass(frozen=True)
class Answered:
    temperature: float
    drafts: Drafts
    requests: list[Request]

    @property
    def tokens(self) -> list[list[int]]:
        return [request.output_token_ids for request in self.requests]

    def record(self, plain: Answered) -> dict[str, Any]:
        """`plain`: whose answers these must be."""
        clean = [r for r in self.requests if not is_looping(r.output_token_ids)]
        stats = total(self.requests)
        return {
            "temperature": self.temperature,
            "K": self.drafts.depth,
            "N": self.drafts.num_nodes,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
            "without_looping": round(total(clean).mean_acceptance_length, 4),
            "looping_answers": len(self.requests) - len(clean),
            "per_position_acceptance": [round(x, 4) for x in stats.per_position_acceptance],
            "num_steps": stats.num_drafts,
            "num_output_tokens": sum(map(len, self.tokens)),
            "different_answers": sum(
                a != b for a, b in zip(self.tokens, plain.tokens, strict=True)
            ),
        }


def total(requests: Sequence[Request]) -> SpecDecodeStats:
    stats = SpecDecodeStats()
    for request in requests:
        stats.merge(request.stats)
    return stats


def answer(
    engine: Engine, prompts: Sequence[list[int]], drafts: Drafts, temperature: float, length: int
) -> Answered:
    params = SamplingParams(
        temperature=temperature,
        max_tokens=length,
        num_speculative_tokens=drafts.depth,
        num_draft_nodes=drafts.num_nodes,
    )
    requests = [
        engine.add_request(str(n), prompt, params, seed=n) for n, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished:
        engine.step()
    return Answered(temperature, drafts, requests)


def gain(tree: Answered, chain: Answered) -> dict[str, Any]:
    """Of the acceptance length, with a 95 % interval over the prompts (bootstrap)."""
    draw, numbers = random.Random(0), range(len(tree.requests))

    def ratio(chosen: Sequence[int]) -> float:
        lengths = [
            total([run.requests[n] for n in chosen]).mean_acceptance_length for run in (tree, chain)
        ]
        return lengths[0] / lengths[1]

    resampled = sorted(ratio(draw.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    return {
        "temperature": tree.temperature,
        "tree": tree.drafts.name,
        "chain": chain.drafts.name,
        "gain": round(ratio(numbers), 4),
        "low": round(resampled[RESAMPLES // 40], 4),
        "high": round(resampled[-RESAMPLES // 40 - 1], 4),
    }


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each temperature."""
    folder = resolve_model(args.model)
    prompts = prompt_tokens(args.prompts, folder)[: args.num_prompts]
    config = EngineConfig(max_num_seqs=args.max_num_seqs, max_model_len=args.max_model_len)
    target = load_engine_target(folder, config).requires_grad_(False)

    def engine(num_nodes: int | None) -> Engine:
        asked = SpeculativeConfig(
            model=args.head, num_speculative_tokens=max(args.depths), num_draft_nodes=num_nodes
        )
        return Engine(
            target,
            config,
            eos_token_ids=eos_token_ids(folder),
            speculation=load_speculation(asked, target),
        )

    chains, trees = engine(None), engine(max(args.nodes))
    weight = target.embed_tokens.weight
    workload = {
        **{key: value for key, value in vars(args).items() if key not in ("out", "prompts")},
        "prompts": [Path(file).name for file in args.prompts],
        "num_prompts": len(prompts),
        "device": str(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
    }
    cells: list[dict[str, Any]] = []
    gains: list[dict[str, Any]] = []
    for number, temperature in enumerate(args.temperatures, start=1):
        as_chains = [
            answer(chains, prompts, Drafts(k), temperature, args.max_tokens) for k in args.depths
        ]
        as_trees = [
            answer(trees, prompts, Drafts(max(args.depths), n), temperature, args.max_tokens)
            for n in args.nodes
        ]
        cells += [run.record(as_chains[0]) for run in (*as_chains, *as_trees)]
        gains += [gain(tree, as_chains[-1]) for tree in as_trees]
        yield {
            "cells": cells,
            "gains": gains,
            "workload": workload | {"temperatures": args.temperatures[:number]},
            "provenance": provenance(probe_torch=True),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--head", default="smollm2-135m-p-eagle")
    parser.add_argument("--prompts", nargs="+", required=True, help="jsonl files; first turns")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 7], help="K of chains")
    parser.add_argument("--nodes", type=int, nargs="+", default=[15, 31], help="N of trees")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    for result in measure(args):
        if args.out:
            write_json(args.out, result)
        print(json.dumps(result["gains"]), flush=True)


if __name__ == "__main__":
    main()

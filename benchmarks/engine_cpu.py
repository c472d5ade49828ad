"""Speed of the embedded engine on a CPU, as ratios within one run.

    python benchmarks/engine_cpu.py --out benchmarks/results/engine_cpu.json

Compares, interleaved, so that drift of the machine hits all alike:
  transformers  `generate`, one request                      (the baseline of plain decoding)
  plain         our engine, one request
  oracle        K = 7 drafts that are always right: the cost of everything but a drafter
  batch         16 requests at once
and, in a process of its own, the peak memory of 16 requests of 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.engine.loading import load_engine_target
from peagle.files import write_json
from peagle.models.drafter import CacheLayout, SequenceDraft
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

MODEL = "smollm2-135m"
PROMPT = "Explain in detail how a bicycle stays upright while it is moving."
NUM_TOKENS = 128
NUM_DRAFTS = 7
BATCH_SIZE = 16
MEMORY_TOKENS = 512


class OracleDrafter:
    """Drafts what the plain target is known to say: the cost of everything but a drafter."""

    method = "oracle"
    aux_hidden_state_layers: tuple[int, ...] = ()
    cache_layout: CacheLayout | None = None
    max_speculative_tokens = 64
    max_tree_depth = 0
    rows_per_depth = 1
    weights_per_row = weights_per_depth = 0
    max_positions: int | None = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens  # prompt and answer

    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        asked = zip(histories, counts, strict=True)
        return [SequenceDraft(self.tokens[len(h) : len(h) + count]) for h, count in asked]


def prompt_ids(folder: Path) -> list[int]:
    message = [{"role": "user", "content": PROMPT}]
    text = load_tokenizer(folder).apply_chat_template(
        message, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = load_tokenizer(folder).encode(text)
    return ids


def run(engine: Engine, prompt: list[int], num_requests: int, num_tokens: int) -> list[int]:
    """Answers `num_requests` copies of the prompt; -> the first answer's tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [engine.add_request(str(i), prompt, params) for i in range(num_requests)]
    while engine.has_unfinished:
        engine.step()
    assert all(len(r.output_token_ids) == num_tokens for r in requests)
    return requests[0].output_token_ids


def seconds(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def measure(repeats: int) -> dict[str, Any]:
    """Median tokens per second of each way, measured in turn `repeats` times."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model(MODEL)
    prompt = prompt_ids(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=1024)
    target = load_engine_target(folder, config)
    plain = Engine(target, config)
    answer = run(plain, prompt, 1, NUM_TOKENS)
    oracle = Engine(
        target, config, speculation=Speculation(OracleDrafter(prompt + answer), NUM_DRAFTS)
    )

    def transformers() -> list[int]:
        out = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    ways: dict[str, tuple[Callable[[], list[int]], int]] = {
        "transformers": (transformers, NUM_TOKENS),
        "plain": (lambda: run(plain, prompt, 1, NUM_TOKENS), NUM_TOKENS),
        "oracle": (lambda: run(oracle, prompt, 1, NUM_TOKENS), NUM_TOKENS),
        "batch": (lambda: run(plain, prompt, BATCH_SIZE, NUM_TOKENS), BATCH_SIZE * NUM_TOKENS),
    }
    same = {name: job() == answer for name, (job, _) in ways.items()}  # warms up, too
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (job, _) in ways.items():
            times[name].append(seconds(job))
    speeds = {name: ways[name][1] / statistics.median(times[name]) for name in ways}
    return {
        "tokens_per_second": speeds,
        "seconds": times,
        "same_tokens_as_plain": same,
        "ratios": {
            "plain_over_transformers": speeds["plain"] / speeds["transformers"],
            "oracle_over_plain": speeds["oracle"] / speeds["plain"],
            "batch_over_plain": speeds["batch"] / speeds["plain"],
        },
        "oracle_mean_acceptance_length": oracle.stats.mean_acceptance_length,
    }


def peak_memory_gib() -> float:
    """Peak resident memory of a fresh process that answers 16 requests of 512 tokens."""
    command = [sys.executable, __file__, "--memory-job"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def memory_job() -> float:
    folder = resolve_model(MODEL)
    config = EngineConfig(device="cpu", dtype="float32")
    engine = Engine(load_engine_target(folder, config), config)
    run(engine, prompt_ids(folder), BATCH_SIZE, MEMORY_TOKENS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--memory-job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_job:
        print(memory_job())
        return
    result = measure(args.repeats) | {
        "peak_memory_gib": peak_memory_gib(),
        "workload": {
            "model": MODEL,
            "dtype": "float32",
            "num_tokens": NUM_TOKENS,
            "num_drafts": NUM_DRAFTS,
            "batch_size": BATCH_SIZE,
            "memory_tokens": MEMORY_TOKENS,
        },
        "provenance": provenance(),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

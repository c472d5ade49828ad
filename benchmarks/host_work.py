"""What the host does for each request in each step of a GPU engine, with the device's steps faked.

    python benchmarks/host_work.py --out benchmarks/results/host_work_cpu.json

The engine for GPUs runs on the CPU here, and its steps return made-up tokens at once: what remains
is Python. While a real step runs, the host has that step's time for all requests in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from engine_gpu import closed_loop

from peagle.bench.run.backend_client import BackendClient
from peagle.bench.run.driver import Load, drive
from peagle.bench.workloads.prompter import Prompter
from peagle.bench.workloads.sources import load_workload
from peagle.config import EngineConfig
from peagle.engine.blocks import BlockAllocator
from peagle.engine.clock import Mark
from peagle.engine.engine import Engine
from peagle.engine.host_sampling import HostSampling
from peagle.engine.llm import LLM
from peagle.engine.runner import Report, Runner
from peagle.engine.scheduler import Chunk
from peagle.engine.step import StepShape
from peagle.files import write_json
from peagle.kernels.device_batch import HEADER
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

MODEL, HEAD = "smollm2-135m", "smollm2-135m-p-eagle"
DEPTHS = (0, 7)  # K; 0: plain
MEMORY = 4 << 30  # bytes of cache that nobody fills
TOKEN = 260  # ends nothing
PER_STEP = 4  # tokens that a step with drafts gives


class FakedRunner(Runner):
    """Each slot says PER_STEP tokens a step, or one where nothing is drafted."""

    def run(
        self,
        shape: StepShape,
        slots: Sequence[int],
        caps: Sequence[int],
        chunks: Sequence[Chunk],
        host: HostSampling | None = None,
    ) -> Report:
        shape = self.padded_shape(shape, chunks)
        self._inputs(shape, slots, caps, chunks)  # as for a device
        rows = torch.full((shape.batch, HEADER + shape.depth + 1), TOKEN)
        rows[:, 0], rows[:, 1], rows[:, 2] = min(PER_STEP, shape.depth + 1), shape.depth, 0
        return Report(rows, Mark(rows.device))


def faked_llm(streams: int, depth: int) -> LLM:
    head = {"model": HEAD, "num_speculative_tokens": depth}
    sizes: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": streams,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": MEMORY,
    }
    llm = LLM(MODEL, speculative_config=head if depth else None, **sizes)
    engine = Engine(
        llm.engine.target,
        EngineConfig(**sizes, max_num_batched_tokens=2048),
        eos_token_ids=sorted(llm.engine.eos_token_ids),
        speculation=llm.engine.speculation,
        static_shapes=True,
        async_scheduling=True,
    )
    engine.runner = FakedRunner(engine.runner.models, [None] * streams, static=True)
    # Blocks as on a GPU, where they need not follow each other.
    blocks = BlockAllocator(engine.allocator.num_blocks, 16, contiguous=False)
    engine.allocator = engine.scheduler.allocator = blocks
    llm.engine = engine
    return llm


def measure(streams: int, depth: int, max_tokens: int) -> dict[str, Any]:
    llm = faked_llm(streams, depth)
    client = BackendClient(llm, Prompter(llm.get_tokenizer()))
    tasks = load_workload("offline").first(4 * streams)
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    seconds = []
    for _ in range(4):
        begun = perf_counter()
        outcome = drive(client, tasks, Load(concurrency=streams), lambda task, turn: params)
        seconds.append(perf_counter() - begun)
    updates = sum(len(record.counts) for record in outcome.records)
    prompts = [client.prompt(task, ()).token_ids for task in tasks]
    engine = min(closed_loop(llm.engine, prompts, params, streams)[1] for _ in range(4))
    best = min(seconds)
    return {
        "streams": streams,
        "K": depth,
        "answers": len(tasks),
        "updates": updates,  # requests times steps
        "us_per_update": best / updates * 1e6,
        "us_per_update_engine_alone": engine / updates * 1e6,
        "ms_per_step": best / updates * streams * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = [measure(args.streams, depth, args.max_tokens) for depth in DEPTHS]
    for cell in cells:
        print(json.dumps(cell))
    if args.out:
        document = {"cells": cells, "provenance": provenance(probe_torch=True)}
        write_json(args.out, document)


if __name__ == "__main__":
    main()

"""What the host does for each request in each step of a GPU engine, with the device's steps faked.

    python benchmarks/host_work.py --out benchmarks/results/host_work_cpu.json

The engine for GPUs runs on the CPU here, and its steps return made-up tokens at once: what remains
is Python. While a real step runs, the host has that step's time for all requests in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from engine_gpu import closed_loop
from numpy.typing import NDArray

from peagle.bench.run.backend_client import BackendClient
from peagle.bench.run.driver import Load, drive
from peagle.bench.workloads.prompter import Prompter
from peagle.bench.workloads.sources import load_workload
from peagle.config import EngineConfig
from peagle.engine.blocks import BlockAllocator
from peagle.engine.build import FREE_ROWS
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
from peagle.speculation.costs import GraphCosts

MODEL, HEAD = "smollm2-135m", "smollm2-135m-p-eagle"
MEMORY = 4 << 30  # bytes of cache that nobody fills
TOKEN = 260  # ends nothing
PER_STEP = 4  # tokens that a step with drafts gives
STEP_SECONDS, ROW_SECONDS = 6e-4, 1.5e-6  # of a faked graph: of which `auto` is told
SETTINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "K = 7": {"num_speculative_tokens": 7},
    "K = 7, N = 15": {"num_speculative_tokens": 7, "num_draft_nodes": 15},
    "auto": {"num_speculative_tokens": 15, "num_draft_nodes": 31, "speculation": "auto"},
}


class FakedRunner(Runner):
    """Each slot says PER_STEP tokens a step, or one where nothing is drafted. Graphs are captured
    at once."""

    has_graphs = True

    def has_graph(self, shape: StepShape) -> bool:
        return shape in self._captured

    def capture(self, shape: StepShape) -> None:
        if shape not in self._captured and self.on_capture is not None:
            self.on_capture(shape, STEP_SECONDS + ROW_SECONDS * shape.decode_rows)
        self._captured.add(shape)

    @cached_property
    def _captured(self) -> set[StepShape]:
        return set()

    def run(
        self,
        shape: StepShape,
        slots: NDArray[np.int64],
        caps: NDArray[np.int64],
        chunks: Sequence[Chunk],
        host: HostSampling | None = None,
    ) -> Report:
        self.capture(shape)
        self._inputs(shape, slots, caps, chunks)  # as for a device
        return Report(faked_report(shape), Mark(self.device))


def faked_report(shape: StepShape) -> torch.Tensor:
    """Of a step in which each request has the same first drafts accepted."""
    depth, num_drafts = shape.depth, shape.mean_nodes or shape.num_nodes or shape.depth
    rows = torch.full((shape.batch, HEADER + depth + 1), TOKEN)
    rows[:, :HEADER] = torch.tensor([min(PER_STEP, depth + 1, num_drafts + 1), num_drafts, 0])
    if shape.num_nodes is None:
        return rows
    path = torch.arange(1, depth + 1).expand(shape.batch, depth)
    places = [] if shape.mean_nodes is None else [(path - 1) * shape.batch]
    return torch.cat((rows, path, *places, torch.zeros(shape.batch, 1, dtype=torch.int64)), 1)


def faked_llm(streams: int, drafts: dict[str, Any] | None) -> LLM:
    sizes: dict[str, Any] = {
        "device": "cpu",
        "max_num_seqs": streams,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": MEMORY,
    }
    head = None if drafts is None else {"model": HEAD, "speculation": "fixed", **drafts}
    llm = LLM(MODEL, speculative_config=head, **sizes)
    engine = Engine(
        llm.engine.target,
        EngineConfig(**sizes, max_num_batched_tokens=2048),
        eos_token_ids=sorted(llm.engine.eos_token_ids),
        speculation=llm.engine.speculation,
        static_shapes=True,
        async_scheduling=True,
    )
    engine.runner = FakedRunner(engine.runner.models, [None] * streams, static=True)
    engine.runner.on_capture = engine._learn_of_graph
    if engine.budget is not None:
        engine.budget.graph_costs = GraphCosts(FREE_ROWS["cuda"])
    # Blocks as on a GPU, where they need not follow each other.
    blocks = BlockAllocator(engine.allocator.num_blocks, 16, contiguous=False)
    engine.allocator = engine.scheduler.allocator = blocks
    llm.engine = engine
    return llm


def measure(streams: int, setting: str, max_tokens: int) -> dict[str, Any]:
    llm = faked_llm(streams, SETTINGS[setting])
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
        "setting": setting,
        "answers": len(tasks),
        "updates": updates,  # requests times steps
        "us_per_update": best / updates * 1e6,
        "us_per_update_engine_alone": engine / updates * 1e6,
        "ms_per_step": best / updates * streams * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[128])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cells = []
    for streams in args.streams:
        for setting in SETTINGS:
            cells.append(measure(streams, setting, args.max_tokens))
            print(json.dumps(cells[-1]))
    if args.out:
        document = {"cells": cells, "provenance": provenance(probe_torch=True)}
        write_json(args.out, document)


if __name__ == "__main__":
    main()

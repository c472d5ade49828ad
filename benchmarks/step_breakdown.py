"""Where the time of one decode step goes on a GPU: kernels by kind, and the floor by bytes moved.

    python benchmarks/step_breakdown.py --model smollm2-135m --head smollm2-135m-p-eagle \\
        --depths 7 --concurrency 1 32 --context 300 --out FILE

A step is captured as the engine captures it, timed in replays that follow each other, and replayed
under torch's profiler. What is left of the step's time when all kernels are subtracted is the gaps
between them: below zero where kernels begin before the one ahead has ended, for those wait longer.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from step_costs import Bench, Drafts, drafters_for, engines, milliseconds, timers
from torch.profiler import ProfilerActivity, profile

from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import load_target
from peagle.files import write_json
from peagle.provenance import provenance

REPLAYS = 20
IN_A_ROW = 4  # as an engine launches them: each begins where the last one ends
BANDWIDTH = {"NVIDIA H200": 4.8e12}  # bytes per second, from the data sheet
KINDS = {  # how a kernel's name tells what it is for; the first that fits
    "attention": ("_attend", "_merge"),
    "rotary embedding, cache write": ("_rotate",),
    "fused products (norm, gate, residual)": ("_fused_linear", "_qkv_to_cache"),
    "products (cuBLAS)": ("gemm", "cutlass", "nvjet", "cublas", "splitK", "gemv"),
    "norms and gates": ("_rms_norm", "_norm_pair", "_weigh_rows", "_silu", "_quantize"),
    "output product with argmax": ("product_peaks_kernel",),
    "sampling": ("peaks_kernel", "merge_kernel", "scores_kernel", "thresholds_kernel"),
    "distributions": ("masses_kernel", "probs_kernel"),
    "rejection": ("uniforms_kernel", "accept_kernel", "sums_kernel", "draw_kernel"),
    "candidates and correction": ("_tops_kernel", "_normed_rows", "_gate_rows", "_lattice_log"),
    "trees": ("_tree_kernel", "_beam_kernel", "_chain_kernel", "_rows_kernel"),
    "bookkeeping": ("_begin", "_plan", "_expand", "_embed", "_pick", "_commit", "_store_drafts"),
}


def kind_of(name: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other torch operations"


def weight_bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def floor_bytes(bench: Bench, batch: int, depth: int, context: int) -> dict[str, float]:
    """What must be read once: the weights that a step uses, and the keys and values."""
    models = bench.models
    target, drafting = models.target, models.drafting
    table = target.embed_tokens.weight
    rows_only = 0 if target.config.tie_word_embeddings else table.numel() * table.element_size()
    parts: dict[str, float] = {"target weights": weight_bytes(target) - rows_only}
    caches = [models.model.cache]
    if depth and drafting is not None:
        network: Any = drafting.drafter.network  # type: ignore[attr-defined]
        own = weight_bytes(network)
        output = network.output_weight()
        shared = 0 if network.lm_head is not None else output.numel() * output.element_size()
        parts["drafter weights, output table"] = own + shared
        caches.append(drafting.model.cache)
    per_token = sum(2 * c.keys.stride(0) // c.keys.shape[1] * c.keys.shape[0] * 2 for c in caches)
    parts["keys and values"] = batch * context * per_token
    return parts


@torch.inference_mode()
def breakdown(bench: Bench, batch: int, drafts: Drafts, context: int) -> dict[str, Any]:
    assert bench.place(batch, context, drafts)
    step = bench.step(batch, drafts, context)
    milliseconds(step)  # compiled and warm
    bench.place(batch, context, drafts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPLAYS):
        bench.place(batch, context, drafts)
        graph.replay()
        begun, ended = timers()
        begun.record()
        for _ in range(IN_A_ROW):
            graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / IN_A_ROW)
    bench.place(batch, context, drafts)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    names: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:  # type: ignore[attr-defined]
            kind = kinds[kind_of(event.name)]
            kind[0] += event.device_time / REPLAYS
            kind[1] += 1 / REPLAYS
            names[event.name] += event.device_time / REPLAYS
    step_ms = sorted(times)[len(times) // 2]
    kernels_us = sum(us for us, _ in kinds.values())
    floor = floor_bytes(bench, batch, drafts.depth, context)
    bandwidth = BANDWIDTH.get(torch.cuda.get_device_name(), 0.0)
    return {
        "K": drafts.depth,
        "nodes": drafts.nodes,
        "mean_nodes": drafts.mean,
        "concurrency": batch,
        "context": context,
        "step_us": 1000 * step_ms,
        "kernels": {k: {"us": us, "launches": n} for k, (us, n) in sorted(kinds.items())},
        "gaps_us": 1000 * step_ms - kernels_us,
        "floor_bytes": floor,
        "floor_us": 1e6 * sum(floor.values()) / bandwidth if bandwidth else None,
        "longest_kernels_us": dict(sorted(names.items(), key=lambda item: -item[1])[:12]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", nargs="*", default=[])
    parser.add_argument("--depths", type=int, nargs="*", default=[7], help="of chains")
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="of trees")
    parser.add_argument("--shared", type=int, nargs="*", default=[], help="as step_costs.py")
    parser.add_argument("--tree-depth", type=int, default=7)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[300])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = load_target(
        resolve_model(args.model), dtype=torch.bfloat16, device=torch.device("cuda")
    ).requires_grad_(False)
    rows = []
    for method, drafter, every in engines(drafters_for(target, args), args):
        bench = Bench(target, drafter, every, args)
        for batch in args.concurrency:
            for drafts in every:
                for context in args.context:
                    row = {"method": method} | breakdown(bench, batch, drafts, context)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    workload = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    if args.out:
        document = {"steps": rows, "workload": workload, "provenance": provenance(probe_torch=True)}
        write_json(args.out, document)


if __name__ == "__main__":
    main()

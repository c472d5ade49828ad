"""Greedy answers in bfloat16 on a GPU, with and without speculation: are differences near ties?

    python benchmarks/lossless_gpu.py --prompts humaneval.jsonl --out FILE

Plain decoding one request at a time is the reference. Where another way of running first chooses
another token, both tokens' logits are computed from the common prefix, in the model's own dtype
and in float32: the gap between them says how near the tie was. Exits with 1 if a gap is larger
than --gap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_gpu import closed_loop, prompt_tokens

from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import eos_token_ids, load_target
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.build import build_engine
from peagle.engine.loading import load_speculation
from peagle.files import write_json
from peagle.models.attention import causal_attention
from peagle.models.target import TargetModel
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams


class Way(NamedTuple):
    """One way to answer the same prompts."""

    name: str
    head: str | None
    depth: int
    concurrency: int


def first_difference(a: list[int], b: list[int]) -> int | None:
    """None if one answer begins with the other, which a shared length limit cannot hide."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@torch.inference_mode()
def gap(target: TargetModel, prefix: list[int], a: int, b: int) -> float:
    """How far the logits of two tokens lie apart after a prefix."""
    device = target.embed_tokens.weight.device
    positions = torch.arange(len(prefix), device=device)
    tokens = torch.tensor(prefix, device=device)
    hidden, _ = target(tokens, positions, causal_attention(positions))
    logits = target.logits(hidden[-1:])[0]
    return abs(float(logits[a] - logits[b]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--p-eagle", default="smollm2-135m-p-eagle")
    parser.add_argument("--eagle3", default="smollm2-135m-eagle3")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--gap", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    folder, device = resolve_model(args.model), torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(folder, dtype=dtype, device=device).requires_grad_(False)
    exact = load_target(folder, dtype=torch.float32, device=device).requires_grad_(False)
    if args.quantization:
        from peagle.models.fp8 import quantize_linears

        quantize_linears(target)
        quantize_linears(exact)
    prompts = prompt_tokens(args.prompts, folder)[: args.limit]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    ways = [
        Way("plain, one at a time", None, 0, 1),
        Way("plain, 32 at once", None, 0, 32),
        Way("P-EAGLE K = 7, one at a time", args.p_eagle, 7, 1),
        Way("P-EAGLE K = 7, 32 at once", args.p_eagle, 7, 32),
        Way("P-EAGLE K = 11, one at a time", args.p_eagle, 11, 1),
        Way("EAGLE-3 K = 5, one at a time", args.eagle3, 5, 1),
    ]
    reference: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for way in ways:
        speculation = None
        if way.head:
            wanted = SpeculativeConfig(model=way.head, num_speculative_tokens=way.depth)
            speculation = load_speculation(wanted, target)
        config = EngineConfig(max_num_seqs=32, max_model_len=2048)
        engine = build_engine(
            target, config, eos_token_ids=eos_token_ids(folder), speculation=speculation
        )
        requests, _, _ = closed_loop(engine, prompts, params, way.concurrency)
        answers = [r.output_token_ids for r in requests]
        reference = reference or answers
        differences = []
        for prompt, a, b in zip(prompts, answers, reference, strict=True):
            at = first_difference(a, b)
            if at is not None:
                prefix = prompt + a[:at]
                near = (gap(target, prefix, a[at], b[at]), gap(exact, prefix, a[at], b[at]))
                differences.append({"position": at, "gap": near[0], "float32_gap": near[1]})
        largest = max((d["gap"] for d in differences), default=0.0)
        exact_largest = max((d["float32_gap"] for d in differences), default=0.0)
        rows.append(
            {
                "way": way.name,
                "answers": len(answers),
                "tokens": sum(map(len, answers)),
                "different": len(differences),
                "largest_gap": largest,
                "largest_float32_gap": exact_largest,
                "differences": differences,
            }
        )
        print(
            f"{way.name:30} {len(differences):3} of {len(answers)} answers differ, largest gap "
            f"{largest:.3f} ({exact_largest:.3f} in float32)",
            flush=True,
        )
        del engine
    worst = max(row["largest_gap"] for row in rows)
    workload = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    workload["prompts"] = [Path(p).name for p in args.prompts]
    if args.out:
        document = {"ways": rows, "workload": workload, "provenance": provenance(probe_torch=True)}
        write_json(args.out, document)
    sys.exit(int(worst > args.gap))


if __name__ == "__main__":
    main()

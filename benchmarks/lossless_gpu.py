"""Greedy answers in bfloat16 on a GPU, with and without speculation: are differences near ties?

    python benchmarks/lossless_gpu.py --prompts humaneval.jsonl --out FILE
    python benchmarks/lossless_gpu.py --prompts humaneval.jsonl --batch-invariant --out FILE

Plain decoding one request at a time is the reference for every answer. Where another way of running
first chooses another token, both tokens' logits are computed from the common prefix, in the model's
own dtype and in float32: the gap between them says how near the tie was. Exits with 1 if a gap is
larger than --gap; with --batch-invariant, if any answer differs at all.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_gpu import closed_loop, prompt_tokens

from peagle.checkpoints.references import resolve_model
from peagle.checkpoints.targets import load_target
from peagle.engine.llm import LLM
from peagle.files import write_json
from peagle.models.attention import causal_attention
from peagle.models.target import TargetModel
from peagle.provenance import provenance
from peagle.sampling_params import SamplingParams

METHODS = ("none", "p-eagle", "eagle3", "ngram")


class Way(NamedTuple):
    """One way to answer the same prompts."""

    method: str
    depth: int
    concurrency: int

    @property
    def name(self) -> str:
        speculation = "plain" if self.method == "none" else f"{self.method} K = {self.depth}"
        together = "one at a time" if self.concurrency == 1 else f"{self.concurrency} at once"
        return f"{speculation}, {together}"


REFERENCE = Way("none", 0, 1)


class Models(NamedTuple):
    """The target as the reference ran it, and in float32."""

    own: TargetModel
    exact: TargetModel


def ways_of(method: str, args: argparse.Namespace) -> list[Way]:
    """The reference first, where it is among them."""
    depths = [0] if method == "none" else args.depths
    ways = [Way(method, depth, c) for depth in depths for c in args.concurrency]
    if method == "none":
        return [REFERENCE, *(way for way in ways if way != REFERENCE)]
    return ways


def make_llm(method: str, args: argparse.Namespace) -> LLM:
    options: dict[str, Any] = {
        "device": args.device,
        "quantization": args.quantization,
        "max_num_seqs": max(args.concurrency),
        "max_model_len": args.max_model_len,
    }
    if args.batch_invariant:
        options["batch_invariant"] = True
    speculative: dict[str, Any] = {"method": method}
    if method != "none":
        speculative["num_speculative_tokens"] = max(args.depths)
    if method in ("p-eagle", "eagle3"):
        speculative["model"] = args.p_eagle if method == "p-eagle" else args.eagle3
    return LLM(args.model, speculative_config=speculative, **options)


def answer(llm: LLM, way: Way, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=way.depth or None
    )
    requests, _, _ = closed_loop(llm.engine, prompts, params, way.concurrency)
    failed = [r.error for r in requests if r.error]
    assert not failed, failed
    return [r.output_token_ids for r in requests]


def first_difference(a: list[int], b: list[int]) -> int | None:
    """None where one answer begins with the other."""
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


def differences(
    prompts: list[list[int]], answers: list[list[int]], reference: list[list[int]], models: Models
) -> Iterator[dict[str, Any]]:
    for number, (prompt, a, b) in enumerate(zip(prompts, answers, reference, strict=True)):
        if a == b:
            continue
        at = first_difference(a, b)
        if at is None:  # one ends where the other goes on, though an end is a token: no tie
            near = [float("inf")] * 2
        else:
            near = [gap(model, prompt + a[:at], a[at], b[at]) for model in models]
        position = min(len(a), len(b)) if at is None else at
        yield {"prompt": number, "position": position, "gap": near[0], "float32_gap": near[1]}


def record(way: Way, answers: list[list[int]], found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "way": way.name,
        **way._asdict(),
        "answers": len(answers),
        "tokens": sum(map(len, answers)),
        "different": len(found),
        "largest_gap": max((d["gap"] for d in found), default=0.0),
        "largest_float32_gap": max((d["float32_gap"] for d in found), default=0.0),
        "differences": found,
    }


def load_exact(folder: Path, args: argparse.Namespace) -> TargetModel:
    exact = load_target(folder, dtype=torch.float32, device=torch.device(args.device))
    if args.quantization:
        from peagle.models.fp8 import quantize_linears

        quantize_linears(exact)
    return exact.requires_grad_(False)


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    workload = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    workload["prompts"] = [Path(p).name for p in args.prompts]
    document = {"ways": rows, "workload": workload, "provenance": provenance(probe_torch=True)}
    if args.out:
        write_json(args.out, document)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def methods(text: str) -> list[str]:
    wanted = text.split(",")
    unknown = set(wanted) - set(METHODS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: use {', '.join(METHODS)}")
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--p-eagle", default="smollm2-135m-p-eagle")
    parser.add_argument("--eagle3", default="smollm2-135m-eagle3")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--methods", type=methods, default=["none", "p-eagle", "eagle3"])
    parser.add_argument("--depths", type=numbers, default=[5, 7, 11], help="such as 5,7,11")
    parser.add_argument("--concurrency", type=numbers, default=[1, 32], help="such as 1,32,128")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--gap", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    folder = resolve_model(args.model)
    prompts = prompt_tokens(args.prompts, folder)[: args.limit]
    exact = load_exact(folder, args)
    models: Models | None = None
    reference: list[list[int]] = []
    rows: list[dict[str, Any]] = []
    for method in ["none", *(m for m in args.methods if m != "none")]:
        llm = make_llm(method, args)
        models = models or Models(llm.engine.target, exact)
        for way in ways_of(method, args) if method in args.methods else [REFERENCE]:
            answers = answer(llm, way, prompts, args.max_tokens)
            reference = reference or answers
            row = record(way, answers, [*differences(prompts, answers, reference, models)])
            rows.append(row)
            print(
                f"{way.name:30} {row['different']:3} of {len(answers)} answers differ, largest gap "
                f"{row['largest_gap']:.3f} ({row['largest_float32_gap']:.3f} in float32)",
                flush=True,
            )
            write(rows, args)  # an interrupted run keeps what it has
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    largest = max(row["largest_gap"] for row in rows)
    differs = any(row["different"] for row in rows)
    sys.exit(int(largest > args.gap or (args.batch_invariant and differs)))


if __name__ == "__main__":
    main()

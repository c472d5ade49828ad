"""Flags of `peagle bench`: the keys of BenchPlan. None: not given, so a file may say it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import typer

from peagle.backends.vllm.options import VllmOptions
from peagle.bench.run.plan import BenchPlan
from peagle.cli.flags import doc_of
from peagle.config import EngineConfig

ANSWERS_PER_STREAM = BenchPlan.answers_per_stream


def _grid(help_text: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help_text, metavar=metavar, rich_help_panel="Grid")


def _work(help_text: str, metavar: str | None = None, flag: str | None = None) -> Any:
    names = (flag,) if flag else ()
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel="Workload")


def _engine(name: str, note: str = "", *, flag: str | None = None) -> Any:
    """The help of an engine's option stands at the field of the engine's config."""
    is_ours = name in {field.name for field in fields(EngineConfig)}
    doc = doc_of(EngineConfig if is_ours else VllmOptions, name)
    assert doc is not None
    owner = "" if is_ours else "vLLM: "
    names = (flag,) if flag else ()
    return typer.Option(*names, help=f"{owner}{doc.text} {note}".strip(), rich_help_panel="Engine")


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """Field names are those of BenchPlan. Lists are written with commas."""

    spec_model: Annotated[str | None, _grid("Heads to measure.", "HEAD,...")] = None
    spec_method: Annotated[
        str | None, _grid("Methods beside none, e.g. ngram; heads say theirs.", "NAME,...")
    ] = None
    spec_tokens: Annotated[
        str | None, _grid("Draft tokens per step; default: each head's advice.", "K,...")
    ] = None
    spec_nodes: Annotated[
        str | None, _grid("Trees of so many draft tokens, beside chains.", "N,...")
    ] = None
    speculation: Annotated[
        str | None,
        _grid("auto: as a head runs by default; fixed: at each K and N (default).", "NAME,..."),
    ] = None
    concurrency: Annotated[str | None, _grid("Streams at once; default: 1.", "C,...")] = None
    request_rate: Annotated[
        str | None, _grid("Requests per second, arriving at random.", "R,...")
    ] = None
    repeats: Annotated[int | None, _grid(f"Of each cell; default: {BenchPlan.repeats}.")] = None
    warmup: Annotated[
        int | None, _grid("Requests before a cell's first run; default: its streams.")
    ] = None
    interleave: Annotated[bool | None, _grid("All cells once, then all again; default: yes.")] = (
        None
    )
    max_engines: Annotated[
        int | None, _grid("Alive at once; default: one per drafter, of vLLM one.")
    ] = None
    workload: Annotated[
        str | None,
        _work(
            "offline (default), mt-bench, humaneval, gsm8k, speed-bench, "
            "synthetic:IN,OUT, a jsonl file, NAME=FILE, or a dataset id.",
            "NAME,...",
        ),
    ] = None
    num_prompts: Annotated[int | None, _work("Of each workload; default: all.")] = None
    answers_per_stream: Annotated[
        int | None,
        _work(f"A run gives at least so many; default: {ANSWERS_PER_STREAM}."),
    ] = None
    min_answers: Annotated[
        int | None, _work("And so many in all; default: those of the whole workload.")
    ] = None
    max_tokens: Annotated[
        int | None, _work(f"Most tokens in an answer; default: {BenchPlan.max_tokens}.")
    ] = None
    temperature: Annotated[
        float | None, _work("0 is greedy (default), and checked for losslessness.")
    ] = None
    ignore_eos: Annotated[
        bool | None, _work("Every answer has --max-tokens tokens.", flag="--ignore-eos")
    ] = None
    raw: Annotated[bool | None, _work("No chat template.", flag="--raw")] = None
    seed: Annotated[int | None, _work("Of sampling, arrivals and random tokens.")] = None
    backend: Annotated[
        str | None,
        typer.Option(
            help="embedded (default), vllm, the address of a server, or sagemaker:ENDPOINT.",
            metavar="NAME|URL",
            rich_help_panel="Engine",
        ),
    ] = None
    dtype: Annotated[str | None, _engine("dtype")] = None
    device: Annotated[str | None, _engine("device")] = None
    max_model_len: Annotated[int | None, _engine("max_model_len")] = None
    max_num_seqs: Annotated[
        int | None, _engine("max_num_seqs", "Default: room for all streams.")
    ] = None
    max_num_batched_tokens: Annotated[int | None, _engine("max_num_batched_tokens")] = None
    block_size: Annotated[int | None, _engine("block_size")] = None
    kv_cache_memory_bytes: Annotated[int | None, _engine("kv_cache_memory_bytes")] = None
    tensor_parallel_size: Annotated[int | None, _engine("tensor_parallel_size")] = None
    quantization: Annotated[str | None, _engine("quantization")] = None
    batch_invariant: Annotated[
        bool | None, _engine("batch_invariant", flag="--batch-invariant")
    ] = None
    gpu_memory_utilization: Annotated[float | None, _engine("gpu_memory_utilization")] = None
    kv_cache_dtype: Annotated[str | None, _engine("kv_cache_dtype")] = None
    enable_prefix_caching: Annotated[
        bool | None, _engine("enable_prefix_caching", "Off: every repeat has the same prompts.")
    ] = None
    enforce_eager: Annotated[bool | None, _engine("enforce_eager")] = None

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

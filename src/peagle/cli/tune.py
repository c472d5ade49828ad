"""`peagle tune`: which method and K to run, from bench results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from peagle.bench.analysis.tune import (
    ALL,
    Advice,
    Cost,
    Tuning,
    cost_of,
    peagle_config,
    tune,
    vllm_config,
)
from peagle.bench.report.verdict import lossless_verdict
from peagle.bench.results.document import Results, load_results
from peagle.bench.results.figures import NOTHING, count, factor_with_bounds, quantity, with_spread
from peagle.bench.results.settings import trees_in_words
from peagle.cli import render
from peagle.cli.flags import Json
from peagle.errors import ConfigError

NATIVE_NOTE = (
    "vLLM reads a head of peagle's own format after `peagle export HEAD --to vllm OUT`; "
    "`peagle serve --backend vllm` does that on the way"
)

ResultsPath = Annotated[
    Path, typer.Argument(metavar="DIR", help="An --out of peagle bench, or its results.json.")
]


def tune_command(
    path: ResultsPath,
    gpu_dollars_per_hour: Annotated[
        float | None, typer.Option(help="Price of one GPU, for tokens per dollar.")
    ] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(help="Wanted output tokens per second, for a number of GPUs.")
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="GPUs that the measured server had, as with tensor parallelism.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Recommend method and K per concurrency and overall, with gain, cost and flags to use."""
    for flag, value in (
        ("--gpu-dollars-per-hour", gpu_dollars_per_hour),
        ("--tokens-per-second", tokens_per_second),
        ("--gpus", gpus),
    ):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{flag} {value:g} is out of range", hint="use a number above 0")
    results = load_results(path)
    tuning = tune(results)
    costs = {
        advice.load: _costs(advice, gpu_dollars_per_hour, tokens_per_second, gpus)
        for advice in tuning.by_load
    }
    print_tuning(results, tuning, costs, sys.stderr if as_json else sys.stdout)
    if as_json:
        render.print_json(_document(tuning, costs))


def _costs(
    advice: Advice, dollars: float | None, wanted: float | None, gpus: int
) -> tuple[Cost, Cost]:
    """The cost of what is advised, and that of no speculation."""
    pair = [
        cost_of(choice.otps.value, num_gpus=gpus, gpu_dollars_per_hour=dollars, wanted_otps=wanted)
        for choice in (advice.best, advice.plain)
    ]
    return pair[0], pair[1]


def _document(tuning: Tuning, costs: dict[str, tuple[Cost, Cost]]) -> dict[str, Any]:
    return {
        "overall": _advice_document(tuning.overall),
        "by_load": [
            _advice_document(a)
            | {"cost": asdict(costs[a.load][0]), "cost_of_none": asdict(costs[a.load][1])}
            for a in tuning.by_load
        ],
        "by_workload": [_advice_document(a) for a in tuning.by_place],
        "notes": list(tuning.notes),
    }


def _advice_document(advice: Advice) -> dict[str, Any]:
    return {
        "workload": None if advice.workload == ALL else advice.workload,
        "load": None if advice.load == ALL else advice.load,
        "method": advice.best.setting.method,
        "num_speculative_tokens": advice.best.setting.num_speculative_tokens,
        "num_draft_nodes": advice.best.setting.num_draft_nodes,
        "is_auto": advice.best.setting.is_auto,
        "otps": asdict(advice.best.otps),
        "gain": asdict(advice.best.gain),
        "acceptance_length": advice.best.acceptance_length,
        "off": advice.off,
        "why": advice.why,
        "as_good_within_noise": [asdict(c.setting) for c in advice.tied],
        "speculative_config": peagle_config(advice.best.setting),
        "vllm_speculative_config": vllm_config(advice.best.setting),
    }


def print_tuning(
    results: Results, tuning: Tuning, costs: dict[str, tuple[Cost, Cost]], file: IO[str]
) -> None:
    columns = ("workload, load", "run", "tokens/s", "gain over none (95 %)", "as good within noise")
    places = [*tuning.by_place] if len({a.workload for a in tuning.by_place}) > 1 else []
    rows = [_advice_row(a) for a in (*places, *tuning.by_load, tuning.overall)]
    render.print_table(f"{results.manifest.model}: what to run", columns, rows, file=file)
    _print_costs(tuning.by_load, costs, file)
    _print_lines(_config_lines(tuning.overall), file)
    off = [a for a in tuning.by_load if a.off]
    lines = [f"off at load {a.load}: {a.why}" for a in off]
    if results.lossless is not None and results.lossless.different:
        equality = lossless_verdict(results.lossless, results.manifest.dtype)
        lines.append(f"note: {equality} peagle report shows where")
    notes = [*tuning.notes, trees_in_words(results.cells)]
    _print_lines([*lines, *(f"note: {note}" for note in notes if note)], file)


def _advice_row(advice: Advice) -> list[str]:
    return [
        f"{advice.workload}, {advice.load}",
        advice.best.name if not advice.off else "none (off)",
        with_spread(advice.best.otps),
        NOTHING if advice.off else factor_with_bounds(advice.best.gain),
        advice.tied_names or NOTHING,
    ]


def _print_costs(
    by_load: Sequence[Advice], costs: dict[str, tuple[Cost, Cost]], file: IO[str]
) -> None:
    first = next(iter(costs.values()))[0]
    if first.tokens_per_dollar is None and first.gpus_for_wanted_rate is None:
        return
    rows = []
    for advice in by_load:
        best, plain = costs[advice.load]
        rows.append([advice.load, advice.best.name, *_cost_columns(best)])
        if not advice.off:
            rows.append([advice.load, advice.plain.name, *_cost_columns(plain)])
    columns = ("load", "run", "tokens per $", "$ per 1M tokens", "GPUs")
    render.print_table("cost, all workloads", columns, rows, names=2, file=file)


def _cost_columns(cost: Cost) -> list[str]:
    per_dollar, per_million = cost.tokens_per_dollar, cost.dollars_per_million_tokens
    return [
        NOTHING if per_dollar is None else quantity(per_dollar),
        NOTHING if per_million is None else quantity(per_million),
        NOTHING if cost.gpus_for_wanted_rate is None else count(cost.gpus_for_wanted_rate),
    ]


def _config_lines(advice: Advice) -> list[str]:
    setting = advice.best.setting
    if advice.off:
        return [f"overall: no speculation ({advice.why}): leave out --speculative-config"]
    lines = [
        f"overall: {advice.best.name}, {advice.why}",
        f"peagle: --speculative-config '{json.dumps(peagle_config(setting))}'",
    ]
    on_vllm = vllm_config(setting)
    if on_vllm is None:
        instead = "with --speculation fixed" if setting.is_auto else "without --spec-nodes"
        return [*lines, f"vLLM:   does not draft trees; measure again {instead}"]
    lines.append(f"vLLM:   --speculative-config '{json.dumps(on_vllm)}'")
    return [*lines, f"note: {NATIVE_NOTE}"] if setting.head else lines


def _print_lines(lines: Sequence[str], file: IO[str]) -> None:
    for line in lines:
        file.write(f"{line}\n")
    file.flush()

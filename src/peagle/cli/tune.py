"""`peagle tune`: which method and K to run, from bench results."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.bench.advice import ALL, Advice
from peagle.bench.costs import Cost, cost_of, peagle_config, vllm_config
from peagle.bench.results_file import load_results
from peagle.bench.tune import Tuning, tune
from peagle.cli import render
from peagle.cli.flags import Json
from peagle.cli.tune_table import print_tuning
from peagle.errors import ConfigError

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
        if value is not None and value <= 0:
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
    """Of what is advised, and of no speculation."""
    pair = [
        cost_of(choice.otps.mean, num_gpus=gpus, gpu_dollars_per_hour=dollars, wanted_otps=wanted)
        for choice in (advice.best, advice.plain)
    ]
    return pair[0], pair[1]


def _document(tuning: Tuning, costs: dict[str, tuple[Cost, Cost]]) -> dict[str, Any]:
    return {
        "overall": _advice(tuning.overall),
        "by_load": [
            _advice(a)
            | {"cost": asdict(costs[a.load][0]), "cost_of_none": asdict(costs[a.load][1])}
            for a in tuning.by_load
        ],
        "by_workload": [_advice(a) for a in tuning.by_place],
        "notes": list(tuning.notes),
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "workload": None if advice.workload == ALL else advice.workload,
        "load": None if advice.load == ALL else advice.load,
        "method": advice.best.setting.method,
        "num_speculative_tokens": advice.best.setting.num_speculative_tokens,
        "otps": asdict(advice.best.otps),
        "gain": asdict(advice.best.gain),
        "acceptance_length": advice.best.acceptance_length,
        "off": advice.off,
        "why": advice.why,
        "as_good_within_noise": [asdict(c.setting) for c in advice.tied],
        "speculative_config": peagle_config(advice.best.setting),
        "vllm_speculative_config": vllm_config(advice.best.setting),
    }

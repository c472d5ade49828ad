"""The advice of `peagle tune` as tables, and the flags to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import IO

from peagle.bench.advice import Advice, in_words
from peagle.bench.costs import Cost, peagle_config, vllm_config
from peagle.bench.results import Results
from peagle.bench.tune import Tuning
from peagle.cli import render

NATIVE_NOTE = (
    "vLLM reads a head of peagle's own format after `peagle export HEAD --to vllm OUT`; "
    "`peagle serve --backend vllm` does that on the way"
)


def print_tuning(
    results: Results, tuning: Tuning, costs: dict[str, tuple[Cost, Cost]], file: IO[str]
) -> None:
    columns = ("workload, load", "run", "tokens/s", "gain over none (95 %)", "as good within noise")
    places = [*tuning.by_place] if len({a.workload for a in tuning.by_place}) > 1 else []
    rows = [_row(a) for a in (*places, *tuning.by_load, tuning.overall)]
    render.print_table(f"{results.manifest.model}: what to run", columns, rows, file=file)
    _print_costs(tuning.by_load, costs, file)
    _print_lines(_config_lines(tuning.overall), file)
    off = [a for a in tuning.by_load if a.off]
    lines = [f"off at load {a.load}: {a.why}" for a in off]
    if results.lossless is not None and results.lossless.different:
        lossless = results.lossless
        lines.append(
            f"note: {lossless.different} of {lossless.compared} answers differ from none's; "
            "peagle report shows where"
        )
    _print_lines([*lines, *(f"note: {note}" for note in tuning.notes)], file)


def _row(advice: Advice) -> list[str]:
    tied = [c.name for c in advice.tied if c.setting != advice.best.setting]
    return [
        f"{advice.workload}, {advice.load}",
        advice.best.name if not advice.off else "none (off)",
        f"{advice.best.otps.mean:.1f}",
        "-" if advice.off else in_words(advice.best.gain),
        "; ".join(tied) or "-",
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
        rows.append([advice.load, *_cost_columns(best), *_cost_columns(plain)])
    columns = ("load", "tokens per $", "$ per 1M", "GPUs", "none: tokens per $", "$ per 1M", "GPUs")
    render.print_table("cost, all workloads", columns, rows, file=file)


def _cost_columns(cost: Cost) -> list[str]:
    per_dollar, per_million = cost.tokens_per_dollar, cost.dollars_per_million_tokens
    return [
        "-" if per_dollar is None else f"{per_dollar:,.0f}",
        "-" if per_million is None else f"{per_million:.3f}",
        "-" if cost.gpus_for_wanted_rate is None else str(cost.gpus_for_wanted_rate),
    ]


def _config_lines(advice: Advice) -> list[str]:
    setting = advice.best.setting
    if advice.off:
        return [f"overall: no speculation ({advice.why}); leave --speculative-config away"]
    lines = [
        f"overall: {advice.best.name}, {advice.why}",
        f"peagle: --speculative-config '{json.dumps(peagle_config(setting))}'",
        f"vLLM:   --speculative-config '{json.dumps(vllm_config(setting))}'",
    ]
    return [*lines, f"note: {NATIVE_NOTE}"] if setting.head else lines


def _print_lines(lines: Sequence[str], file: IO[str]) -> None:
    for line in lines:
        file.write(f"{line}\n")
    file.flush()

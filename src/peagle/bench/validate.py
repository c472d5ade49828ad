"""Predictions against a bench result's own measured OTPS: how far the model can be trusted.

Two errors for each cell. `own`: the cell's own step times and acceptance, so only what a step's
clock does not see (harness, waiting, the ends of answers) is left. `left out`: step times and
acceptance from the neighbouring K and concurrencies alone, as for a point nobody has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from peagle.bench.acceptance import Profile, tokens_per_step
from peagle.bench.cells import Cell, Run
from peagle.bench.measured_costs import PARTS, PLAIN, MeasuredCosts, MeasuredStep
from peagle.bench.results import Results
from peagle.bench.settings import NONE, Setting, setting_of, usable_runs
from peagle.errors import ConfigError, DataError


@dataclass(frozen=True)
class Checked:
    setting: Setting
    workload: str
    concurrency: int
    measured_otps: float
    own: float  # predicted OTPS
    left_out: float | None  # None: no neighbours on both sides


@dataclass(frozen=True)
class Errors:
    """Shares of the measured OTPS, without sign."""

    median: float
    worst: float
    num_cells: int


@dataclass(frozen=True)
class Validation:
    cells: tuple[Checked, ...]
    own: Errors
    left_out: Errors | None


def validate(results: Results) -> Validation:
    timed = [cell for cell in results.cells if cell.concurrency and _steps(cell)]
    if not timed:
        raise DataError(
            "no cell has step times to predict from",
            hint="bench the embedded engine: others show no draft and verify times",
        )
    checked = tuple(
        _check(cell, [c for c in timed if c.workload == cell.workload]) for cell in timed
    )
    own = [abs(c.own / c.measured_otps - 1) for c in checked]
    other = [abs(c.left_out / c.measured_otps - 1) for c in checked if c.left_out is not None]
    return Validation(checked, _errors(own), _errors(other) if other else None)


def measured_table(results: Results) -> MeasuredCosts:
    """Step times of all cells with a concurrency; workloads are averaged."""
    groups: dict[tuple[object, ...], list[MeasuredStep]] = {}
    for cell in results.cells:
        for step in _steps(cell) if cell.concurrency else []:
            key = (step.part, step.method, step.k, step.concurrency)
            groups.setdefault(key, []).append(step)
    means = [replace(s[0], seconds=fmean(x.seconds for x in s)) for s in groups.values()]
    if not means:
        raise DataError("no cell has step times", hint="bench the embedded engine")
    return MeasuredCosts(tuple(means))


def _check(cell: Cell, workload: Sequence[Cell]) -> Checked:
    assert cell.concurrency is not None
    others = [
        c for c in workload if c is not cell and (c.method, c.head) == (cell.method, cell.head)
    ]
    return Checked(
        setting=setting_of(cell),
        workload=cell.workload,
        concurrency=cell.concurrency,
        measured_otps=fmean(run.otps for run in usable_runs(cell)),
        own=_predict(cell, [cell]),
        left_out=_predict_or_none(cell, others),
    )


def _predict(cell: Cell, sources: Sequence[Cell]) -> float:
    """OTPS of `cell` from step times and acceptance of `sources`."""
    assert cell.concurrency is not None
    costs = MeasuredCosts(tuple(step for source in sources for step in _steps(source)))
    if cell.method == NONE:
        return cell.concurrency / costs.plain(cell.concurrency, 0)
    length = _profile(sources).length(cell.num_speculative_tokens)
    step = costs.speculative(cell.method, cell.num_speculative_tokens, cell.concurrency, 0)
    return cell.concurrency * length / step


def _predict_or_none(cell: Cell, sources: Sequence[Cell]) -> float | None:
    try:
        return _predict(cell, sources)
    except ConfigError:  # outside of what the others measured
        return None


def _profile(sources: Iterable[Cell]) -> Profile:
    """Acceptance does not depend on the load, so those of all loads are taken."""
    runs: dict[int, list[Run]] = {}
    for source in sources:
        drafting = [run for run in usable_runs(source) if run.stats.get("num_drafts")]
        if drafting:
            runs.setdefault(source.num_speculative_tokens, []).extend(drafting)
    return Profile({k: tokens_per_step(group) for k, group in runs.items()})


def _steps(cell: Cell) -> list[MeasuredStep]:
    """Seconds of one step of all requests at once: the engine's clock counts steps per request."""
    runs = [run for run in usable_runs(cell) if run.stats.get("num_steps")]
    seconds = {part: sum(run.stats.get(f"{part}_time", 0.0) for run in runs) for part in PARTS}
    if not runs or not sum(seconds.values()) or cell.concurrency is None:
        return []
    per_step = cell.concurrency / sum(run.stats["num_steps"] for run in runs)
    if cell.method == NONE:
        return [MeasuredStep(PLAIN, cell.concurrency, sum(seconds.values()) * per_step)]
    method, k = cell.method, cell.num_speculative_tokens
    return [
        MeasuredStep(part, cell.concurrency, total * per_step, method=method, k=k)
        for part, total in seconds.items()
    ]


def _errors(shares: Sequence[float]) -> Errors:
    return Errors(median(shares), max(shares), len(shares))

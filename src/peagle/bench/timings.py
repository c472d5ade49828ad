"""Latencies, the parts of the time and looping answers of a report, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from peagle.bench.cells import Cell, Quantiles, Run
from peagle.bench.results import Results
from peagle.bench.series import loads, representatives
from peagle.bench.settings import Setting, by_place, setting_of, usable_runs

PARTS = ("draft", "verify", "other")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one output token, by what they went into."""

    setting: Setting
    draft: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.other


def latency_tails(
    results: Results, workload: str, metric: str
) -> dict[Setting, dict[str, Quantiles]]:
    """Representative settings -> load -> quantiles in seconds, means over the repeats."""
    chosen, found = representatives(results), dict[Setting, dict[str, Quantiles]]()
    for place, cells in by_place(results.cells).items():
        for setting in chosen:
            if place.workload == workload and setting in cells:
                quantiles = cell_quantiles(cells[setting], metric)
                if quantiles is not None:
                    found.setdefault(setting, {})[place.load] = quantiles
    return found


def cell_quantiles(cell: Cell, metric: str) -> Quantiles | None:
    known = [q for run in usable_runs(cell) if (q := getattr(run.latencies, metric)) is not None]
    if not known:
        return None
    names = [field.name for field in fields(Quantiles)]
    return Quantiles(**{name: fmean(getattr(q, name) for q in known) for name in names})


def time_breakdown(results: Results) -> dict[str, list[Breakdown]]:
    """load -> representative settings, over all workloads. Empty where the engine has no clock."""
    found: dict[str, list[Breakdown]] = {}
    for load in loads(results):
        for setting in representatives(results):
            cells = [c for c in results.cells if c.load == load and setting_of(c) == setting]
            runs = [run for cell in cells for run in usable_runs(cell)]
            part = _breakdown(setting, runs)
            if part is not None:
                found.setdefault(load, []).append(part)
    return found


def _breakdown(setting: Setting, runs: Sequence[Run]) -> Breakdown | None:
    tokens = sum(run.num_output_tokens for run in runs)
    seconds = [sum(run.stats.get(f"{part}_time", 0.0) for run in runs) for part in PARTS]
    if not tokens or not sum(seconds):
        return None
    return Breakdown(setting, *(s / tokens for s in seconds))


def looping_share(runs: Iterable[Run]) -> float | None:
    known = [(r.looping_share, r.num_requests) for r in runs if r.looping_share is not None]
    total = sum(n for _, n in known)
    return sum(share * n for share, n in known) / total if total else None

"""What a report shows, as numbers: one function for each figure. Imports no matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import fmean, median

from peagle.bench.analysis.gains import gains_at, speeds_of
from peagle.bench.results.document import Cell, CellRun, Quantiles, Results
from peagle.bench.results.intervals import Interval
from peagle.bench.results.settings import (
    NONE,
    Setting,
    by_place,
    load_key,
    series_names,
    setting_of,
    short_name,
    usable_runs,
)

PARTS = ("draft", "verify", "other")


@dataclass(frozen=True)
class SpeedUp:
    """A method's best K under one load."""

    load: str
    gain: Interval
    k: int


def workloads(results: Results) -> list[str]:
    return sorted({place.workload for place in by_place(results.cells)})


def loads(results: Results) -> list[str]:
    return sorted({place.load for place in by_place(results.cells)}, key=load_key)


def speed_ups(results: Results) -> dict[str, dict[str, list[SpeedUp]]]:
    """workload -> series -> the best K's gain over none at each concurrency."""
    names, found = series_names(results.cells), dict[str, dict[str, list[SpeedUp]]]()
    for place, cells in by_place(results.cells).items():
        for setting, gain in gains_at(place, cells).items():
            if setting.method != NONE:
                points = found.setdefault(place.workload, {}).setdefault(names[setting.series], [])
                _keep_the_faster(points, SpeedUp(place.load, gain, setting.num_speculative_tokens))
    return found


def _keep_the_faster(points: list[SpeedUp], new: SpeedUp) -> None:
    for n, old in enumerate(points):
        if old.load == new.load:
            points[n] = max(old, new, key=lambda p: p.gain.value)
            return
    points.append(new)


def acceptance_by_k(results: Results) -> dict[str, dict[str, dict[int, float]]]:
    """workload -> series -> K -> mean acceptance length, over all loads and repeats."""
    names, found = series_names(results.cells), dict[str, dict[str, dict[int, float]]]()
    for (workload, setting), runs in _drafting_runs(results).items():
        steps = sum(run.stats["num_drafts"] for run in runs)
        kept = sum(run.stats["num_accepted_tokens"] for run in runs)
        by_k = found.setdefault(workload, {}).setdefault(names[setting.series], {})
        by_k[setting.num_speculative_tokens] = 1 + kept / steps
    return found


def per_position(results: Results) -> dict[str, dict[str, list[float]]]:
    """workload -> `p-eagle K=7` (each series' deepest) -> share of steps by draft position."""
    names, found = series_names(results.cells), dict[str, dict[str, list[float]]]()
    grouped = _drafting_runs(results)
    for (workload, setting), runs in grouped.items():
        same = [s for w, s in grouped if w == workload and s.series == setting.series]
        if setting.num_speculative_tokens == max(s.num_speculative_tokens for s in same):
            steps = sum(run.stats["num_drafts"] for run in runs)
            counts = [run.stats["num_accepted_tokens_per_pos"] for run in runs]
            totals = [sum(column) for column in zip_longest(*counts, fillvalue=0)]
            rates = [total / steps for total in totals]
            found.setdefault(workload, {})[short_name(setting, names)] = rates
    return found


def representatives(results: Results) -> list[Setting]:
    """None, and each series' K that is fastest over the whole grid."""
    speeds: dict[Setting, list[float]] = {}
    for cells in by_place(results.cells).values():
        for setting, cell in cells.items():
            speeds.setdefault(setting, []).append(math.log(median(speeds_of(cell).values())))
    best: dict[tuple[str, str | None], Setting] = {}
    for setting, logs in speeds.items():
        leader = best.setdefault(setting.series, setting)
        # First by the number of places: in a partial grid the fast ones may be all one has.
        if (len(logs), fmean(logs)) > (len(speeds[leader]), fmean(speeds[leader])):
            best[setting.series] = setting
    return sorted(best.values(), key=lambda s: s.sort_key)


def _drafting_runs(results: Results) -> dict[tuple[str, Setting], list[CellRun]]:
    found: dict[tuple[str, Setting], list[CellRun]] = {}
    for place, cells in by_place(results.cells).items():
        for setting, cell in cells.items():
            runs = [run for run in usable_runs(cell) if run.stats.get("num_drafts")]
            if runs:
                found.setdefault((place.workload, setting), []).extend(runs)
    return found


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one output token, by the part of a step that they went into."""

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


def _breakdown(setting: Setting, runs: Sequence[CellRun]) -> Breakdown | None:
    tokens = sum(run.num_output_tokens for run in runs)
    seconds = [sum(run.stats.get(f"{part}_time", 0.0) for run in runs) for part in PARTS]
    if not tokens or not sum(seconds):
        return None
    return Breakdown(setting, *(s / tokens for s in seconds))


def looping_share(runs: Iterable[CellRun]) -> float | None:
    known = [(r.looping_share, r.num_requests) for r in runs if r.looping_share is not None]
    total = sum(n for _, n in known)
    return sum(share * n for share, n in known) / total if total else None

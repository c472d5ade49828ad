"""What a report draws, as plain numbers: one function for each figure. Imports no matplotlib."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from peagle.bench.cells import Run
from peagle.bench.gains import gains_at, speeds_of
from peagle.bench.intervals import Interval
from peagle.bench.results import Results
from peagle.bench.settings import (
    NONE,
    Setting,
    by_place,
    load_key,
    series_names,
    short_name,
    usable_runs,
)


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
            points[n] = max(old, new, key=lambda p: p.gain.mean)
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
            speeds.setdefault(setting, []).append(math.log(fmean(speeds_of(cell).values())))
    best: dict[tuple[str, str | None], Setting] = {}
    for setting, logs in speeds.items():
        leader = best.setdefault(setting.series, setting)
        # First by the number of places: in a partial grid the fast ones may be all one has.
        if (len(logs), fmean(logs)) > (len(speeds[leader]), fmean(speeds[leader])):
            best[setting.series] = setting
    return sorted(best.values(), key=lambda s: s.sort_key)


def _drafting_runs(results: Results) -> dict[tuple[str, Setting], list[Run]]:
    found: dict[tuple[str, Setting], list[Run]] = {}
    for place, cells in by_place(results.cells).items():
        for setting, cell in cells.items():
            runs = [run for run in usable_runs(cell) if run.stats.get("num_drafts")]
            if runs:
                found.setdefault((place.workload, setting), []).extend(runs)
    return found

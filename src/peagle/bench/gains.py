"""What a setting gains over none: one computation for every table, figure and piece of advice.

Repeat n of one setting ran beside repeat n of the others (grid.turns), so those are compared: what
slows down the whole machine for a while hits both and cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from peagle.bench.cells import Cell
from peagle.bench.intervals import Interval
from peagle.bench.ratios import Speeds, scatter_of
from peagle.bench.settings import NONE, Place, Setting, usable_repeats, usable_runs


def speeds_of(cell: Cell) -> dict[int, float]:
    return {number: run.otps for number, run in usable_repeats(cell).items()}


def gains_at(place: Place, cells: Mapping[Setting, Cell]) -> dict[Setting, Interval]:
    """Of every setting over none; none's own is 1. Empty where none was not measured, and under
    a request rate: there the arrivals set the tokens per second."""
    if place.is_open_loop:
        return {}
    return gains({setting: speeds_of(cell) for setting, cell in cells.items()})


def gains(speeds: Mapping[Setting, Speeds]) -> dict[Setting, Interval]:
    """The same from speeds; their scatter is pooled over all settings."""
    plain = next((own for setting, own in speeds.items() if setting.method == NONE), None)
    if plain is None:
        return {}
    scatter = scatter_of(speeds.values())
    return {setting: scatter.ratio(own, plain) for setting, own in speeds.items()}


def mixed_speeds(cells: Sequence[Cell], weights: Sequence[float]) -> dict[int, float]:
    """OTPS of traffic that has `weights` tokens under each cell's workload and load, one value
    a repeat: all tokens over the time they take, so slow cells count for what they cost."""
    rows = [speeds_of(cell) for cell in cells]
    shared = sorted(set.intersection(*(set(row) for row in rows)))
    if not shared:  # only cut repeats, of different rounds: one value of what there is
        rows, shared = [{0: fmean(row.values())} for row in rows], [0]
    total = sum(weights)
    return {
        n: total / sum(weight / row[n] for weight, row in zip(weights, rows, strict=True))
        for n in shared
    }


def mean_tokens(cell: Cell) -> float:
    return fmean(run.num_output_tokens for run in usable_runs(cell))

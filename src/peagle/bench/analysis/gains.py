"""What a setting gains over none: one computation for every table, figure and piece of advice.

Repeat n of one setting ran beside repeat n of the others (grid.run_order), so those are compared:
what slows down the whole machine for a while hits both and cancels. A gain is the median of these
ratios: one repeat that was disturbed does not move it. Speeds scatter by factors, so ratios and
their 95 % intervals are computed from logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from peagle.bench.results.document import Cell
from peagle.bench.results.intervals import (
    FEWEST_DEGREES,
    Interval,
    median_over_mean,
    t_quantile,
)
from peagle.bench.results.settings import NONE, Place, Setting, usable_runs

Speeds = Mapping[int, float]  # number of the repeat -> tokens per second


def speeds_of(cell: Cell) -> dict[int, float]:
    return {number: run.otps for number, run in cell.usable_repeats().items()}


def gains_at(place: Place, cells: Mapping[Setting, Cell]) -> dict[Setting, Interval]:
    """The gain of every setting over none; none's own is 1. Empty where none was not measured, and
    under a request rate: there the arrivals set the tokens per second."""
    if place.is_open_loop:
        return {}
    return gains({setting: speeds_of(cell) for setting, cell in cells.items()})


def fastest_at(place: Place, cells: Mapping[Setting, Cell]) -> Setting:
    """What gains most, which is what advice names; without gains, what has most tokens/s."""
    gained = gains_at(place, cells)
    if gained:
        return max(gained, key=lambda setting: gained[setting].value)
    return max(cells, key=lambda setting: median(speeds_of(cells[setting]).values()))


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
        rows, shared = [{0: median(row.values())} for row in rows], [0]
    total = sum(weights)
    return {
        n: total / sum(weight / row[n] for weight, row in zip(weights, rows, strict=True))
        for n in shared
    }


def mean_tokens(cell: Cell) -> float:
    return fmean(run.num_output_tokens for run in usable_runs(cell))


@dataclass(frozen=True)
class Scatter:
    """How much the speeds of settings that ran in the same repeats scatter against each other.

    Pooled over all of them: with two or three repeats a setting's own scatter says little, and
    among many settings some look calm by chance. `variance` is that of one log speed, without
    what a whole repeat has in common (drift); None from a single repeat or setting.
    """

    variance: float | None
    degrees: int = 0

    def ratio(self, new: Speeds, base: Speeds) -> Interval:
        """`new` over `base`, from the repeats that both have; no bounds from too few."""
        assert new, "no repeats to compare"
        assert base, "no repeats to compare with"
        logs = [math.log(new[n] / base[n]) for n in new if n in base]
        if not logs:
            return Interval(math.exp(_median_log(new.values()) - _median_log(base.values())))
        if self.variance is None or self.degrees < FEWEST_DEGREES or len(logs) == 1:
            return Interval(math.exp(median(logs)), num_values=len(logs))
        half = t_quantile(self.degrees) * math.sqrt(2 * self.variance / len(logs))
        return _from_logs(median(logs), half, len(logs))


def scatter_of(rows: Iterable[Speeds]) -> Scatter:
    """`rows`: one for each setting. Those that lack a repeat of the longest are left out. What
    remains of a log speed behind its setting's mean and its repeat's is scatter: with two rows
    this is the paired t test."""
    speeds = list(rows)
    repeats = max((row.keys() for row in speeds), key=len, default=set[int]())
    logs = [[math.log(row[n]) for n in repeats] for row in speeds if row.keys() >= repeats]
    degrees = (len(logs) - 1) * (len(repeats) - 1)
    if degrees < 1:
        return Scatter(None)
    by_repeat = [fmean(column) for column in zip(*logs, strict=True)]
    middle = fmean(by_repeat)
    squares = math.fsum(
        (value - fmean(row) - repeat + middle) ** 2
        for row in logs
        for value, repeat in zip(row, by_repeat, strict=True)
    )
    return Scatter(squares / degrees, degrees)


def unpaired_ratio(new: Sequence[float], base: Sequence[float]) -> Interval:
    """`new` over `base` of two separate measurements (Welch). No bounds from too few."""
    assert new, "no repeats to compare"
    assert base, "no repeats to compare with"
    center, fewest = _median_log(new) - _median_log(base), min(len(new), len(base))
    if fewest - 1 < FEWEST_DEGREES:
        return Interval(math.exp(center), num_values=fewest)
    parts = [variance(map(math.log, speeds)) / len(speeds) for speeds in (new, base)]
    degrees = _welch_degrees(parts, [len(new), len(base)])
    return _from_logs(center, t_quantile(degrees) * math.sqrt(sum(parts)), fewest)


def is_above(ratio: Interval, bound: float) -> bool:
    """Whether the whole interval is; never known without one."""
    return ratio.low is not None and ratio.low > bound


def is_below(ratio: Interval, bound: float) -> bool:
    return ratio.high is not None and ratio.high < bound


def _welch_degrees(parts: Sequence[float], counts: Sequence[int]) -> int:
    """Rounded down, so that the interval is rather too wide; 2 less a rounding error stays 2."""
    spread = sum(part**2 / (n - 1) for part, n in zip(parts, counts, strict=True))
    if spread == 0:  # no scatter at all: the half width is zero anyway
        return min(counts) - 1
    return max(1, math.floor(sum(parts) ** 2 / spread + 1e-6))


def _median_log(speeds: Iterable[float]) -> float:
    return median(math.log(speed) for speed in speeds)


def _from_logs(center: float, half: float, count: int) -> Interval:
    """`half`: half the width of the interval that a mean of so many logarithms has."""
    half *= median_over_mean(count)
    bounds = math.exp(center - half), math.exp(center + half)
    return Interval(math.exp(center), *bounds, num_values=count)

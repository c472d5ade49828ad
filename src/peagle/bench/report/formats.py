"""Figures as HTML, the same in every table."""

from __future__ import annotations

from peagle.bench.cells import Cell
from peagle.bench.intervals import Interval

DASH = "&ndash;"
TIMES = "&times;"


def ratio(gain: Interval) -> str:
    bounds = (
        "" if gain.low is None or gain.high is None else f" ({gain.low:.2f}&ndash;{gain.high:.2f})"
    )
    return f"{gain.mean:.2f}{TIMES}{bounds}"


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def speed_with_bounds(speed: Interval) -> str:
    if speed.half_width is None:
        return f"{speed.mean:,.1f}"
    return f"{speed.mean:,.1f} &plusmn; {speed.half_width:,.1f}"


def partial_mark(cell: Cell) -> str:
    return " (partial)" if any(run.partial for run in cell.repeats) else ""

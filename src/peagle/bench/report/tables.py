"""The first tables of a report: what to run, and speed by setting and load."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from peagle.bench import series
from peagle.bench.advice import Advice
from peagle.bench.cells import Cell
from peagle.bench.gains import gains_at, speeds_of
from peagle.bench.line_plots import load_label
from peagle.bench.report.formats import DASH, TIMES, partial_mark, ratio
from peagle.bench.report.markup import table, text
from peagle.bench.results import Results
from peagle.bench.settings import (
    NONE,
    Names,
    Place,
    Setting,
    by_place,
    series_names,
    short_name,
)
from peagle.bench.tune import Tuning


def what_to_run(tuning: Tuning) -> str:
    rows = [
        [
            text(advice.load),
            text("off" if advice.off else advice.best.name),
            DASH if advice.off else ratio(advice.best.gain),
            f"{advice.best.otps.mean:,.1f}",
            text(_tied(advice)) or DASH,
        ]
        for advice in tuning.by_load
    ]
    label = load_label([advice.load for advice in tuning.by_load])
    columns = ("load", "run", "gain (95 %)", "tokens/s", "as good within noise")
    caption = f"What to run by {label}: all workloads, weighted by tokens"
    return table(columns, rows, caption=caption, kind="grid", words=(1, 4))


def _tied(advice: Advice) -> str:
    return "; ".join(c.name for c in advice.tied if c.setting != advice.best.setting)


def speed_tables(results: Results) -> str:
    """One for each workload: settings down, loads across."""
    found, names = by_place(results.cells), series_names(results.cells)
    return "\n".join(
        _speed_table(results, workload, found, names) for workload in series.workloads(results)
    )


def _speed_table(
    results: Results,
    workload: str,
    found: Mapping[Place, Mapping[Setting, Cell]],
    names: Names,
) -> str:
    places = [Place(workload, load) for load in series.loads(results)]
    columns = {place.load: _speed_column(place, found[place]) for place in places if place in found}
    settings = sorted({s for column in columns.values() for s in column}, key=lambda s: s.sort_key)
    rows = [
        [text(short_name(s, names)), *(column.get(s, DASH) for column in columns.values())]
        for s in settings
    ]
    label = load_label(list(columns))
    caption = f"{workload}: tokens/s and gain by {label}; \N{BLACK STAR} is fastest"
    return table(["method", *map(text, columns)], rows, caption=caption, kind="grid")


def _speed_column(place: Place, cells: Mapping[Setting, Cell]) -> dict[Setting, str]:
    speeds = {setting: fmean(speeds_of(cell).values()) for setting, cell in cells.items()}
    gained, most = gains_at(place, cells), max(speeds.values())
    column = {}
    for setting, cell in cells.items():
        value = f"{speeds[setting]:,.1f}{partial_mark(cell)}"
        value = f"<strong>&#9733; {value}</strong>" if speeds[setting] == most else value
        if setting in gained and setting.method != NONE:
            value += f' <span class="small">{gained[setting].mean:.2f}{TIMES}</span>'
        column[setting] = value
    return column

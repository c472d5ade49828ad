"""The tables of a report: what to run, speed by setting and load, and every figure of all cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from peagle.bench.analysis import series
from peagle.bench.analysis.gains import gains_at, speeds_of
from peagle.bench.analysis.tune import Advice, Tuning
from peagle.bench.report.markup import (
    DASH,
    TIMES,
    details,
    number,
    partial_mark,
    ratio,
    share,
    speed_with_bounds,
    table,
    text,
)
from peagle.bench.report.plots import load_label
from peagle.bench.results.document import Cell, Results
from peagle.bench.results.settings import (
    NONE,
    Names,
    Place,
    Setting,
    by_place,
    series_names,
    short_name,
    usable_runs,
)


def what_to_run(tuning: Tuning) -> str:
    rows = [
        [
            text(advice.load),
            text("off" if advice.off else advice.best.name),
            DASH if advice.off else ratio(advice.best.gain),
            f"{advice.best.otps.value:,.1f}",
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
            value += f' <span class="small">{gained[setting].value:.2f}{TIMES}</span>'
        column[setting] = value
    return column


def every_cell(results: Results) -> str:
    """All figures of all cells, for those who look closer."""
    columns = (
        *("workload, load", "setting", "repeats", "tokens/s (95 %)", "... no tail"),
        *("asked again", "length", "... no loops"),
        *("loops", "TTFT p50 / p95 / p99 ms", "TPOT ms", "ITL ms", "E2EL s", "peak GiB", "GPU"),
    )
    names = series_names(results.cells)
    rows = [
        row
        for place, cells in by_place(results.cells).items()
        for row in _cell_rows(place, cells, names)
    ]
    inner = table(columns, rows, caption="Every cell", kind="wide")
    return details(f"Every figure of all {len(rows)} cells", inner)


def _cell_rows(
    place: Place,
    cells: Mapping[Setting, Cell],
    names: Names,
) -> Iterator[list[str]]:
    for setting, cell in cells.items():
        summary, runs = cell.summary(), usable_runs(cell)
        assert summary is not None
        memory = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes]
        busy = [run.gpu_utilization for run in runs if run.gpu_utilization is not None]
        yield [
            f"{text(place.workload)}, {text(place.load)}",
            text(short_name(setting, names)),
            f"{summary.num_repeats}{partial_mark(cell)}",
            speed_with_bounds(summary.otps),
            DASH if summary.steady_otps is None else f"{summary.steady_otps:,.1f}",
            str(max(run.num_repeated for run in runs)),
            number(summary.acceptance_length),
            number(summary.acceptance_without_looping),
            share(series.looping_share(runs)),
            *(_tails(cell, metric) for metric in ("ttft", "tpot", "itl", "e2el")),
            f"{max(memory) / 2**30:.2f}" if memory else DASH,
            share(sum(busy) / len(busy) if busy else None),
        ]


def _tails(cell: Cell, metric: str) -> str:
    found = series.cell_quantiles(cell, metric)
    if found is None:
        return DASH
    factor = 1.0 if metric == "e2el" else 1e3
    return " / ".join(f"{q * factor:.3g}" for q in (found.p50, found.p95, found.p99))

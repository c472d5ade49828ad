"""The tables of a report: what to run, speed by setting and load, and every figure of all cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from peagle.bench.analysis import series
from peagle.bench.analysis.gains import fastest_at, gains_at
from peagle.bench.analysis.tune import Tuning
from peagle.bench.report.markup import details, gain, marks, or_nothing, spread, table, text
from peagle.bench.report.plots import load_label
from peagle.bench.results import figures
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
            text(_load_title(advice.load)),
            text("off" if advice.off else advice.best.name),
            gain(advice.choices[0].gain) if advice.off else gain(advice.best.gain),
            spread(figures.with_spread(advice.best.otps)),
            _unbroken(text(advice.tied_names)) or or_nothing(figures.NOTHING),
        ]
        for advice in tuning.by_load
    ]
    columns = ("load", "run", "gain of the fastest", "tokens/s", "as good within noise")
    caption = "What to run: all workloads, weighted by tokens"
    return table(columns, rows, caption=caption, kind="grid", words=(1, 2, 3, 4))


def _unbroken(names: str) -> str:
    """Lines break between names, not behind the hyphen of one."""
    parts = (f'<span class="name">{name}</span>' for name in names.split(", "))
    return ", ".join(parts) if names else ""


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
        [text(short_name(s, names)), *(column.get(s, "&ndash;") for column in columns.values())]
        for s in settings
    ]
    label = load_label(list(columns))
    caption = f"{workload}: tokens/s and gain by {label}; \N{BLACK STAR} is fastest"
    loads = [text(_load_title(load)) for load in columns]
    return table(["method", *loads], rows, caption=caption, kind="grid roomy")


def _load_title(load: str) -> str:
    return load if load.endswith("/s") else f"{int(load):,} at once"


def _speed_column(place: Place, cells: Mapping[Setting, Cell]) -> dict[Setting, str]:
    gained, fastest, column = gains_at(place, cells), fastest_at(place, cells), {}
    for setting, cell in cells.items():
        summary = cell.summary()
        assert summary is not None, "a cell without repeats is left out"
        value = f"{spread(figures.with_spread(summary.otps))}{marks(cell)}"
        value = f"<strong>&#9733; {value}</strong>" if setting == fastest else value
        if setting in gained and setting.method != NONE:
            value += f"<br>{gain(gained[setting])}"
        column[setting] = value
    return column


def every_cell(results: Results) -> str:
    """All figures of all cells, for those who look closer."""
    columns = (
        *("workload, load", "setting", "repeats", "tokens/s", "no tail"),
        *("asked again", "acceptance length", "no loops", "loops"),
        *("TTFT ms p50 / p95 / p99", "TPOT ms", "ITL ms", "E2EL ms", "peak GiB", "GPU", "others"),
    )
    names = series_names(results.cells)
    rows = [
        row
        for place, cells in by_place(results.cells).items()
        for row in _cell_rows(place, cells, names)
    ]
    nothing = or_nothing(figures.NOTHING)
    known = [n for n in range(len(columns)) if any(row[n] != nothing for row in rows)]
    inner = table(
        [columns[n] for n in known], [[row[n] for n in known] for row in rows],
        caption="Every cell", kind="wide roomy", words=(1,),
    )  # fmt: skip
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
        others = [run.other_cpu_share for run in runs if run.other_cpu_share is not None]
        steady = summary.steady_otps
        values = (
            f"{summary.num_repeats}{marks(cell)}",
            spread(figures.with_spread(summary.otps)),
            figures.NOTHING if steady is None else figures.quantity(steady),
            figures.count(max(run.num_repeated for run in runs)),
            figures.length(summary.acceptance_length),
            figures.length(summary.acceptance_without_looping),
            figures.share(series.looping_share(runs)),
            *(_tails(cell, metric) for metric in ("ttft", "tpot", "itl", "e2el")),
            figures.quantity(max(memory) / 2**30) if memory else figures.NOTHING,
            figures.share(fmean(busy) if busy else None),
            figures.share(max(others) if others else None),
        )
        where = f"{text(place.workload)}, {text(place.load)}"
        yield [where, text(short_name(setting, names)), *map(or_nothing, values)]


def _tails(cell: Cell, metric: str) -> str:
    found = series.cell_quantiles(cell, metric)
    if found is None:
        return figures.NOTHING
    return " / ".join(figures.quantity(q * 1e3) for q in (found.p50, found.p95, found.p99))

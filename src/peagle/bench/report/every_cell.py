"""The table of every figure of all cells, for those who look closer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from peagle.bench import timings
from peagle.bench.cells import Cell
from peagle.bench.report.formats import DASH, number, partial_mark, share, speed_with_bounds
from peagle.bench.report.markup import details, table, text
from peagle.bench.results import Results
from peagle.bench.settings import (
    Names,
    Place,
    Setting,
    by_place,
    series_names,
    short_name,
    usable_runs,
)


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
            share(timings.looping_share(runs)),
            *(_tails(cell, metric) for metric in ("ttft", "tpot", "itl", "e2el")),
            f"{max(memory) / 2**30:.2f}" if memory else DASH,
            share(sum(busy) / len(busy) if busy else None),
        ]


def _tails(cell: Cell, metric: str) -> str:
    found = timings.cell_quantiles(cell, metric)
    if found is None:
        return DASH
    factor = 1.0 if metric == "e2el" else 1e3
    return " / ".join(f"{q * factor:.3g}" for q in (found.p50, found.p95, found.p99))

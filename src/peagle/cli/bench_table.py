"""Bench results as tables."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from peagle.bench.gains import gains_at
from peagle.bench.sameness import lossless_verdict
from peagle.bench.settings import Setting, by_place, full_name, series_names
from peagle.bench.timings import cell_quantiles
from peagle.cli import render

if TYPE_CHECKING:
    from peagle.bench.cells import Cell, Quantiles
    from peagle.bench.intervals import Interval
    from peagle.bench.results import Lossless, Results

COLUMNS = (
    *("method", "K", "load", "tokens/s", "+-", "speed-up", "acceptance", "no loops"),
    *("TTFT p50", "TPOT p50", "E2EL p95"),
)
MOST_SHOWN = 5


def print_results(results: Results, *, file: IO[str]) -> None:
    """One table per workload, times in milliseconds, then what the check of losslessness found."""
    names, rows = series_names(results.cells), dict[str, list[list[str]]]()
    for place, cells in by_place(results.cells).items():
        gained = gains_at(place, cells)
        rows.setdefault(place.workload, []).extend(
            _row(names[setting.series], cell, gained.get(setting))
            for setting, cell in cells.items()
        )
    for workload, own in rows.items():
        render.print_table(f"{workload} (latencies in ms)", COLUMNS, own, file=file)
    for line in lossless_lines(results.lossless, results.manifest.dtype):
        file.write(line + "\n")
    for line in _failures(results):
        file.write(line + "\n")
    if results.partial:
        file.write("partial: not every run of the grid is there\n")


def _failures(results: Results) -> list[str]:
    found = dict.fromkeys(e for c in results.cells for run in c.repeats for e in run.errors)
    lines = [f"failed: {error}" for error in list(found)[:MOST_SHOWN]]
    more = len(found) - len(lines)
    return [*lines, f"  and {more} more: results.json has them"] if more else lines


def lossless_lines(lossless: Lossless | None, dtype: str) -> list[str]:
    if lossless is None:
        return []
    lines = [lossless_verdict(lossless, dtype)]
    if lossless.not_comparable:
        lines.append(f"  {lossless.not_comparable} more followed a turn that differed")
    for d in lossless.differences[:MOST_SHOWN]:
        gap = "" if d.gap is None else f", log-probabilities {d.gap:.2g} apart"
        name = full_name(Setting(d.method, d.num_speculative_tokens))
        lines.append(
            f"  {name} at {d.load}, {d.prompt}, turn {d.turn + 1}, token {d.position + 1}: "
            f"{d.got_text!r} for {d.expected_text!r}{gap}"
        )
    if lossless.different > MOST_SHOWN:
        lines.append(f"  and {lossless.different - MOST_SHOWN} more: peagle report shows them")
    return lines


def _row(name: str, cell: Cell, gain: Interval | None) -> list[str]:
    summary = cell.summary()
    assert summary is not None, "a cell without repeats is left out"
    otps = summary.otps
    return [
        name + (" (partial)" if summary.partial else ""),
        str(cell.num_speculative_tokens or "-"),
        cell.load,
        f"{otps.mean:.1f}",
        "-" if otps.half_width is None else f"{otps.half_width:.1f}",
        "-" if gain is None else f"{gain.mean:.2f}x",
        _number(summary.acceptance_length),
        _number(summary.acceptance_without_looping),
        _milliseconds(cell_quantiles(cell, "ttft"), "p50"),
        _milliseconds(cell_quantiles(cell, "tpot"), "p50"),
        _milliseconds(cell_quantiles(cell, "e2el"), "p95"),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(quantiles: Quantiles | None, name: str) -> str:
    return "-" if quantiles is None else f"{1000 * getattr(quantiles, name):.1f}"

"""`peagle bench compare A B`: a table of both, and an exit code for machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

from peagle.cli import render

if TYPE_CHECKING:
    from peagle.bench.compare import Compared, Comparison
    from peagle.bench.intervals import Interval

COLUMNS = ("method", "K", "workload", "load", "A tokens/s", "B tokens/s", "B / A", "acceptance")


def run_compare(a: Path, b: Path, *, tolerance: float | None, force: bool, as_json: bool) -> int:
    """-> the exit code: 1 on a regression beyond noise."""
    from peagle.bench.compare import TOLERANCE, compare
    from peagle.bench.results_file import load_results

    allowed = TOLERANCE if tolerance is None else tolerance
    found = compare(load_results(a), load_results(b), tolerance=allowed, force=force)
    print_comparison(found, sys.stderr if as_json else sys.stdout)
    if as_json:
        render.print_json(found.to_json())
    return found.exit_code


def print_comparison(found: Comparison, file: IO[str]) -> None:
    render.print_table("B against A", COLUMNS, [_row(cell) for cell in found.cells], file=file)
    for warning in found.warnings:
        file.write(f"note: {warning}\n")
    for name, cells in (("A", found.only_a), ("B", found.only_b)):
        if cells:
            file.write(f"only in {name}: {', '.join(cells)}\n")
    worse = len(found.regressions)
    file.write(f"{worse} of {len(found.cells)} cells are worse beyond noise\n")


def _row(cell: Compared) -> list[str]:
    lengths = (cell.acceptance_a, cell.acceptance_b)
    return [
        cell.setting.method,
        str(cell.setting.num_speculative_tokens or "-"),
        cell.place.workload,
        cell.place.load,
        _speed(cell.a),
        _speed(cell.b),
        f"{_ratio(cell.ratio)} {'WORSE' if cell.is_regression else cell.verdict}",
        "-" if None in lengths else " -> ".join(f"{length:.2f}" for length in lengths),
    ]


def _speed(speed: Interval) -> str:
    half = speed.half_width
    return f"{speed.mean:.1f}" + ("" if half is None else f" +-{half:.1f}")


def _ratio(ratio: Interval) -> str:
    bounds = "" if ratio.low is None else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.mean:.3f}{bounds}"

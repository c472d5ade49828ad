"""Bench results as one HTML file without scripts, network or fonts of its own, and as PNG plots."""

from __future__ import annotations

from pathlib import Path

from peagle.bench.plot_style import render
from peagle.bench.plots import all_plots
from peagle.bench.report.page import build_page
from peagle.bench.results import Results
from peagle.files import write_atomic


def write_report(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, build_page(results))


def write_plots(results: Results, folder: Path) -> list[Path]:
    """One PNG for each figure, named after it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in all_plots(results):
        path = folder / f"{plot.name}.png"
        write_atomic(path, render(plot, file_format="png"))
        written.append(path)
    return written

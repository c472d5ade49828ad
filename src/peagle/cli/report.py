"""`peagle report`: bench results as one HTML file, and as PNG plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peagle.cli import render
from peagle.cli.flags import Json
from peagle.cli.tune import ResultsPath
from peagle.errors import ConfigError


def report_command(
    path: ResultsPath,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: report.html beside the results.")
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also PNG plots beside it, for a README.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write one self-contained HTML file: verdict, tables, plots, answers, manifest."""
    from peagle.bench.report.page import write_plots, write_report
    from peagle.bench.results.document import load_results

    results = load_results(path)
    file = out or (path if path.is_dir() else path.parent) / "report.html"
    try:
        write_report(results, file)
        plots = write_plots(results, file.parent) if png else []
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}", hint="give another --out FILE"
        ) from None
    if as_json:
        render.print_json({"report": str(file), "plots": [str(plot) for plot in plots]})
    else:
        render.write("".join(f"{written}\n" for written in (file, *plots)))

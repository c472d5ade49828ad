"""The page from top to bottom: one HTML file without scripts, network or fonts of its own.

`write_plots` writes its figures as PNG files.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template

from peagle.bench.analysis.tune import Tuning, tune
from peagle.bench.report import answers, tables, verdict
from peagle.bench.report.manifest import machine, manifest_block
from peagle.bench.report.markup import bullets, details, paragraph, picture, section, text
from peagle.bench.report.plot_style import Plot, render
from peagle.bench.report.plots import LATENCY, all_plots
from peagle.bench.report.tables import every_cell
from peagle.bench.report.verdict import lossless_verdict
from peagle.bench.results.document import Results
from peagle.errors import DataError
from peagle.files import write_atomic


def build_page(results: Results) -> str:
    tuning = _tuning(results)
    manifest = results.manifest
    return Template(_file("template.html")).substitute(
        title=text(f"{manifest.model}: speculative decoding, measured"),
        heading=text(manifest.model),
        style=_file("style.css"),
        subtitle=text(f"{manifest.backend}, {manifest.dtype}, {machine(manifest)}"),
        time=text(manifest.provenance.get("time", "")),
        partial=_partial_banner(results),
        verdict=_verdict(results, tuning),
        sections="\n\n".join(block for block in _sections(results, tuning) if block),
    )


def _sections(results: Results, tuning: Tuning | None) -> list[str]:
    lossless = results.lossless
    return [
        section(
            "table",
            "Speed",
            tables.what_to_run(tuning) if tuning else "",
            tables.speed_tables(results),
            every_cell(results),
        ),
        section("plots", "Plots", *_plots(results)),
        section("answers", "Answers side by side", answers.samples_block(results.samples)),
        section(
            "lossless",
            "Is the output the same?",
            paragraph(text(lossless_verdict(lossless, results.manifest.dtype))),
            answers.differences_block(lossless.differences if lossless else []),
        ),
        section("loops", "Looping answers", *_looping(results)),
        section("manifest", "How this was measured", manifest_block(results.manifest)),
    ]


def _plots(results: Results) -> list[str]:
    """Latencies of the first workload stand open; the others look alike and fold."""
    plots = all_plots(results)
    folded = [plot for plot in plots if plot.name.startswith(LATENCY)][1:]
    shown = [picture(plot) for plot in plots if plot not in folded]
    return [*shown, details("Latency tails of the other workloads", _pictures(folded))]


def _pictures(plots: list[Plot]) -> str:
    return "\n".join(picture(plot) for plot in plots)


def _verdict(results: Results, tuning: Tuning | None) -> str:
    figures = "\n".join(
        f'<div class="figure"><span class="value">{text(f.value)}</span> '
        f'<span class="what">{text(f.what)}</span></div>'
        for f in verdict.key_figures(results, tuning)
    )
    return "\n".join(
        [
            paragraph(text(verdict.headline(tuning)), kind="headline"),
            f'<div class="figures">\n{figures}\n</div>' if figures else "",
            bullets(text(sentence) for sentence in verdict.sentences(results, tuning)),
        ]
    )


def _looping(results: Results) -> list[str]:
    sentence = verdict.looping_sentence(results)
    return [paragraph(text(sentence)), answers.looping_table(results)] if sentence else []


def _partial_banner(results: Results) -> str:
    errors = [error for cell in results.cells for run in cell.repeats for error in run.errors]
    broken = any(run.partial for cell in results.cells for run in cell.repeats)
    if not results.partial and not broken:
        return ""
    what = "The grid is not finished." if results.partial else "Some repeats were cut short."
    words = f"Partial results. {what} Missing cells are dashes, repeats cut short are marked."
    listed = bullets(text(error) for error in dict.fromkeys(errors))
    return f'<div class="partial" role="note"><p>{text(words)}</p>\n{listed}</div>'


def _tuning(results: Results) -> Tuning | None:
    try:
        return tune(results)
    except DataError:  # nothing to compare with, which the verdict says
        return None


def _file(name: str) -> str:
    return resources.files("peagle.bench.report").joinpath(name).read_text(encoding="utf-8")


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

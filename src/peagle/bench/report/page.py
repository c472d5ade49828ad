"""The page from top to bottom: one HTML file without scripts, network or fonts of its own.

`write_plots` writes its figures as PNG files.
"""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import Path
from string import Template

from peagle.bench.analysis import series
from peagle.bench.analysis.tune import Tuning, peagle_config, tune, vllm_config
from peagle.bench.report import answers, tables, verdict
from peagle.bench.report.manifest import machine, manifest_block, measured_at
from peagle.bench.report.markup import (
    bullets,
    command,
    details,
    paragraph,
    picture,
    section,
    text,
)
from peagle.bench.report.plot_style import Plot, render
from peagle.bench.report.plots import LATENCY, all_plots
from peagle.bench.report.tables import every_cell
from peagle.bench.report.trees import trees_block
from peagle.bench.report.verdict import lossless_details, lossless_verdict
from peagle.bench.results.document import Manifest, Results
from peagle.bench.results.settings import trees_in_words
from peagle.errors import DataError
from peagle.files import atomic_file, write_atomic

TITLES = {  # anchors
    "verdict": "Verdict",
    "run": "Run this",
    "table": "Speed",
    "plots": "Plots",
    "trees": "Trees of drafts",
    "answers": "Answers side by side",
    "lossless": "Is the output the same?",
    "loops": "Looping answers",
    "manifest": "How this was measured",
}


def build_page(results: Results) -> str:
    tuning, manifest = _tuning(results), results.manifest
    blocks = {anchor: section(anchor, TITLES[anchor], *found)
              for anchor, found in page_sections(results, tuning).items()}  # fmt: skip
    links = [f'<a href="#{name}">{TITLES[name]}</a>' for name, block in blocks.items() if block]
    return Template(_file("template.html")).substitute(
        title=text(f"{manifest.model}: speculative decoding, measured"),
        heading=text(manifest.model),
        style=_file("style.css"),
        subtitle=text(about(manifest)),
        time=text(measured_at(manifest)),
        contents="\n".join(links),
        partial=_partial_banner(results),
        sections="\n\n".join(block for block in blocks.values() if block),
    )


def about(manifest: Manifest) -> str:
    """What every figure of a report depends on."""
    engine = "embedded engine" if manifest.backend == "embedded" else manifest.backend
    return f"{engine}, {manifest.dtype}, {machine(manifest)}"


def page_sections(results: Results, tuning: Tuning | None) -> dict[str, list[str]]:
    """By anchor, top to bottom."""
    return {
        "verdict": _verdict(results, tuning),
        "run": _run_this(results.manifest, tuning) if tuning else [],
        "table": [
            paragraph(text(trees), kind="note") if (trees := trees_in_words(results.cells)) else "",
            tables.what_to_run(tuning) if tuning else "",
            paragraph(text(_repeats(results)), kind="note") if results.cells else "",
            tables.speed_tables(results),
            every_cell(results),
        ],
        "plots": _plots(results),
        "trees": [trees_block(results.trees)],
        "answers": [answers.samples_block(results.samples, _sample_load(results))],
        "lossless": _lossless(results),
        "loops": _looping(results),
        "manifest": [manifest_block(results.manifest)],
    }


def _repeats(results: Results) -> str:
    """How to read a cell."""
    return (
        "Speeds are medians over the repeats, \N{PLUS-MINUS SIGN} their 95 % interval; of two "
        "repeats the range. Gains are over method none under the same load, with 95 % intervals: "
        "\N{BLACK UP-POINTING TRIANGLE} sure gain, \N{BLACK DOWN-POINTING TRIANGLE} sure loss, "
        "\N{ALMOST EQUAL TO} no clear difference."
    )


def _run_this(manifest: Manifest, tuning: Tuning) -> list[str]:
    """The advice for all of the traffic, as commands."""
    advice = tuning.overall
    model, setting = shlex.quote(manifest.model), advice.best.setting
    config = peagle_config(setting)
    option = f" --speculative-config {shlex.quote(json.dumps(config))}" if config else ""
    why = f"No speculation: {advice.why}."
    if config:
        why = f"{advice.best.name}, the best for all of this traffic together. A click selects it."
    blocks = [paragraph(text(why)), command(f"peagle generate {model} 'Hello'{option}")]
    if advice.off or vllm_config(setting) is not None:  # vLLM drafts no trees and chooses no K
        blocks.append(command(f"peagle serve {model} --backend vllm{option}"))
    return blocks


def _sample_load(results: Results) -> str:
    loads = series.loads(results)
    return f", {verdict.load_in_words(loads[0])}" if loads else ""


def _lossless(results: Results) -> list[str]:
    found, dtype = results.lossless, results.manifest.dtype
    return [
        paragraph(text(lossless_verdict(found, dtype))),
        bullets(map(text, lossless_details(found, dtype))),
        answers.differences_block(found.differences if found else []),
    ]


def _plots(results: Results) -> list[str]:
    """Latencies of the first workload stand open; the others look alike and fold."""
    plots = all_plots(results)
    folded = [plot for plot in plots if plot.name.startswith(LATENCY)][1:]
    shown = [picture(plot) for plot in plots if plot not in folded]
    return [*shown, details("Latency tails of the other workloads", _pictures(folded))]


def _pictures(plots: list[Plot]) -> str:
    return "\n".join(picture(plot) for plot in plots)


def _verdict(results: Results, tuning: Tuning | None) -> list[str]:
    figures = "\n".join(
        f'<div class="figure"><span class="value">{text(f.value)}</span> '
        f'<span class="what">{text(f.what)}</span></div>'
        for f in verdict.key_figures(results, tuning)
    )
    dtype = results.manifest.dtype
    behind = bullets(map(text, lossless_details(results.lossless, dtype)))
    return [
        paragraph(text(verdict.headline(tuning)), kind="headline"),
        f'<div class="figures">\n{figures}\n</div>' if figures else "",
        paragraph(text(lossless_verdict(results.lossless, dtype))),
        details("How equal the answers are", behind),
        bullets(text(sentence) for sentence in verdict.sentences(results, tuning)),
    ]


def _looping(results: Results) -> list[str]:
    sentence = verdict.looping_sentence(results)
    return [paragraph(text(sentence)), answers.looping_table(results)] if sentence else []


def _partial_banner(results: Results) -> str:
    errors = [error for cell in results.cells for run in cell.repeats for error in run.errors]
    broken = any(run.partial for cell in results.cells for run in cell.repeats)
    if not results.partial and not broken:
        return ""
    what = "The grid is unfinished." if results.partial else "Some repeats were cut short."
    words = f"Partial results. {what} Missing cells are dashes; repeats cut short are marked."
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
    with atomic_file(path) as temporary:  # a wrong path is found before the plots are drawn
        temporary.write_text(build_page(results), encoding="utf-8")


def write_plots(results: Results, folder: Path) -> list[Path]:
    """One PNG for each figure, named after it."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in all_plots(results):
        path = folder / f"{plot.name}.png"
        heading = f"{results.manifest.model}: {about(results.manifest)}"
        write_atomic(path, render(plot, heading=heading, file_format="png"))
        written.append(path)
    return written

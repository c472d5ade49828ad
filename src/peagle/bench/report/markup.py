"""HTML out of text, and figures that look the same in every table.

Whatever comes from a prompt, a model or a manifest goes through `text`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from peagle.bench.report.plot_style import Plot, render
from peagle.bench.results.document import Cell
from peagle.bench.results.intervals import Interval

BREAKPOINT = "640px"  # below it a screen is a phone; style.css has the same number
DASH = "&ndash;"
TIMES = "&times;"


def text(value: object) -> str:
    """Escaped, and without the half characters that cannot be written."""
    return html.escape(str(value).encode("utf-8", "replace").decode(), quote=True)


def section(anchor: str, title: str, *blocks: str) -> str:
    """Empty without content, so that a missing figure leaves no heading behind."""
    body = "\n".join(block for block in blocks if block)
    return f'<section id="{anchor}">\n<h2>{text(title)}</h2>\n{body}\n</section>' if body else ""


def paragraph(content: str, *, kind: str = "") -> str:
    return f'<p class="{kind}">{content}</p>' if kind else f"<p>{content}</p>"


def bullets(items: Iterable[str]) -> str:
    lines = "".join(f"<li>{item}</li>\n" for item in items)
    return f"<ul>\n{lines}</ul>" if lines else ""


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    kind: str = "",
    words: Sequence[int] = (),
) -> str:
    """Cells are HTML. The first column names the row, those in `words` hold no numbers. The table
    scrolls in a box of its own, which the keyboard reaches too."""
    left = ["" if n not in words else ' class="words"' for n in range(len(columns))]
    names = zip(columns, left, strict=True)
    head = "".join(f'<th scope="col"{class_}>{column}</th>' for column, class_ in names)
    body = "\n".join(_row(row, left) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">\n'
        f'<table class="{kind}">\n<caption><span>{text(caption)}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _row(cells: Sequence[str], classes: Sequence[str]) -> str:
    pairs = list(zip(cells, classes, strict=True))[1:]
    values = "".join(f"<td{class_}>{cell}</td>" for cell, class_ in pairs)
    return f'<tr><th scope="row">{cells[0]}</th>{values}</tr>'


def details(summary: str, body: str) -> str:
    return f"<details>\n<summary>{text(summary)}</summary>\n{body}\n</details>" if body else ""


def picture(plot: Plot) -> str:
    """Both widths in the page; the browser shows the one that fits."""
    wide, narrow = (_data_url(render(plot, narrow=n)) for n in (False, True))
    return (
        f"<figure>\n<h3>{text(plot.title)}</h3>\n<picture>\n"
        f'<source media="(max-width: {BREAKPOINT})" srcset="{narrow}">\n'
        f'<img src="{wide}" alt="{text(plot.alt)}">\n</picture>\n'
        f"<figcaption>{text(plot.note)}</figcaption>\n</figure>"
    )


def _data_url(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def ratio(gain: Interval) -> str:
    bounds = (
        "" if gain.low is None or gain.high is None else f" ({gain.low:.2f}&ndash;{gain.high:.2f})"
    )
    return f"{gain.value:.2f}{TIMES}{bounds}"


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def speed_with_bounds(speed: Interval) -> str:
    if speed.half_width is None:
        return f"{speed.value:,.1f}"
    return f"{speed.value:,.1f} &plusmn; {speed.half_width:,.1f}"


def partial_mark(cell: Cell) -> str:
    return " (partial)" if any(run.partial for run in cell.repeats) else ""

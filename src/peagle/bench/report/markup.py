"""HTML out of text, and figures that look the same in every table.

Whatever comes from a prompt, a model or a manifest goes through `text`.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from peagle.bench.analysis.gains import is_above, is_below
from peagle.bench.report.plot_style import Plot, render
from peagle.bench.results.document import Cell
from peagle.bench.results.figures import NOTHING, factor_with_bounds
from peagle.bench.results.intervals import Interval

BREAKPOINT = "640px"  # below it a screen is a phone; style.css has the same number


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
    scrolls in a box of its own, which the keyboard reaches too; on a phone a row is a block, in
    which each cell has its column's name above it."""
    left = ["" if n not in words else ' class="words"' for n in range(len(columns))]
    names = zip(columns, left, strict=True)
    head = "".join(f'<th scope="col"{class_}>{column}</th>' for column, class_ in names)
    body = "\n".join(_row(row, left, columns) for row in rows)
    return (
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{text(caption)}">\n'
        f'<table class="{kind}">\n<caption><span>{text(caption)}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _row(cells: Sequence[str], classes: Sequence[str], columns: Sequence[str]) -> str:
    values = "".join(
        f'<td{class_} data-label="{column}">{cell}</td>'
        for cell, class_, column in list(zip(cells, classes, columns, strict=True))[1:]
    )
    return f'<tr><th scope="row">{cells[0]}</th>{values}</tr>'


def details(summary: str, body: str) -> str:
    return f"<details>\n<summary>{text(summary)}</summary>\n{body}\n</details>" if body else ""


def command(words: str) -> str:
    """A click selects the whole line."""
    return f'<pre class="command"><code>{text(words)}</code></pre>'


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


def gain(ratio: Interval) -> str:
    """Coloured, and with a sign for those who see no colours: up, down, or within noise; neither
    where too few repeats leave that open."""
    sign, kind = ("&asymp;&nbsp;", "even") if ratio.low is not None else ("", "unsure")
    if is_above(ratio, 1.0):
        sign, kind = "&#9650;&nbsp;", "up"
    elif is_below(ratio, 1.0):
        sign, kind = "&#9660;&nbsp;", "down"
    value, _, bounds = factor_with_bounds(ratio).partition(" ")
    return f'<span class="{kind}">{sign}{value}</span> <span class="small">{bounds}</span>'


def spread(words: str) -> str:
    """`38.8 (36.0 to 41.6)` with what lies behind the figure smaller."""
    value, space, rest = words.partition(" ")
    return f'{value}{space}<span class="small">{rest}</span>' if rest else value


def or_nothing(value: str) -> str:
    return "&ndash;" if value == NOTHING else value


def marks(cell: Cell) -> str:
    summary = cell.summary()
    found = ["partial"] * any(run.partial for run in cell.repeats)
    found += ["busy"] * (summary is not None and summary.busy)
    return f" ({', '.join(found)})" if found else ""

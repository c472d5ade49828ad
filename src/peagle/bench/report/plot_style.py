"""How figures look. Made to be read in black and white: a method has its own marker and line
style everywhere, parts of a bar have hatches, lines are named in place.

Every figure comes in two widths: `wide` for a page, `narrow` for a phone, where panels stand
below each other and letters keep their size.
"""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from peagle.bench.results.settings import NONE
from peagle.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 9.6, 4.0  # inches
PANEL_WIDTH, PANEL_HEIGHT = 4.8, 3.0  # of a panel alone: it need not fill the page
MOST_LOADS_NARROW = 4
LETTERS_PER_INCH, LINE_HEIGHT, SOFT = 15, 0.17, "#55585f"  # of notes; inches
PART_LOOKS = {"draft": ("#ffffff", "///"), "verify": ("#9fb8dd", ""), "other": ("#4a4a4a", "")}
STYLE: dict[Any, Any] = {  # matplotlib's names
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "svg.fonttype": "none",  # letters stay letters: small files, searchable text
    "svg.hashsalt": "peagle",  # the same results give the same file
    "hatch.linewidth": 0.8,
    "text.parse_math": False,  # a workload may be called $x$
}


@dataclass(frozen=True)
class Look:
    marker: str
    line: str | tuple[int, tuple[int, ...]]
    color: str


# Dark enough for white paper, and of different lightness for a grey printer.
LOOKS = {
    NONE: Look("o", ":", "#555555"),
    "ngram": Look("^", (0, (1, 1)), "#8a5a00"),
    "eagle3": Look("s", "--", "#b3261e"),
    "p-eagle": Look("D", "-", "#12448c"),
}
SPARE = (
    Look("v", "-.", "#3f6b1f"),
    Look("P", (0, (5, 1)), "#6a3d9a"),
    Look("X", (0, (3, 1, 1, 1)), "#00707a"),
)


@dataclass(frozen=True)
class Plot:
    """A figure that knows how to draw itself, and what it says to those who cannot see it."""

    name: str  # of its file
    title: str
    alt: str
    note: str  # how to read it
    draw: Callable[[bool], Figure]  # narrow?


def look_of(name: str, names: Sequence[str]) -> Look:
    """The same method looks the same in every figure; its second head, and methods that we do
    not know, take spare looks in the order of `names`."""
    taken: dict[str, Look] = {}
    spare = cycle(SPARE)
    for other in names:
        known = LOOKS.get(other.split(" ")[0])
        taken[other] = known if known and known not in taken.values() else next(spare)
    return taken[name]


def render(
    plot: Plot, *, narrow: bool = False, heading: str | None = None, file_format: str = "svg"
) -> bytes:
    """`heading` says what was measured: with it a picture stands alone, its title and the note on
    how to read it included."""
    with _matplotlib():
        figure = plot.draw(narrow)
        if heading is not None:
            _explain(figure, plot, heading)
        buffer = io.BytesIO()
        if file_format == "svg":  # without a background: a page may be dark
            figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
        else:
            figure.savefig(buffer, format=file_format, dpi=160)
    return buffer.getvalue()


def _explain(figure: Figure, plot: Plot, heading: str) -> None:
    """Title, what was measured and how to read it, in room above the panels."""
    width, height = figure.get_size_inches()
    letters = int(width * LETTERS_PER_INCH)
    lines = [*textwrap.wrap(heading, letters), *textwrap.wrap(plot.note, letters)]
    whole = height + (len(lines) + 3) * LINE_HEIGHT
    figure.set_size_inches(width, whole)
    figure.set_layout_engine("constrained", rect=(0.0, 0.0, 1.0, height / whole))
    title, rest = (1 - n * LINE_HEIGHT / whole for n in (0.6, 2.1))
    figure.text(0.01, title, plot.title, va="top", fontsize=11, fontweight="bold")
    figure.text(0.01, rest, "\n".join(lines), va="top", fontsize=8, color=SOFT, linespacing=1.45)


@contextlib.contextmanager
def _matplotlib() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "plots need matplotlib, which is not installed", hint="pip install 'peagle[plots]'"
        ) from None
    with matplotlib.rc_context(STYLE):
        yield


def panels(titles: Sequence[str], *, narrow: bool, across: int = 3) -> tuple[Figure, list[Axes]]:
    """One axes for each title: side by side, or below each other."""
    from matplotlib.figure import Figure

    columns = 1 if narrow else min(across, len(titles))
    rows = -(-len(titles) // columns)
    width = NARROW if narrow else min(WIDE, PANEL_WIDTH * columns)
    figure = Figure(figsize=(width, PANEL_HEIGHT * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    flat = [grid[n // columns][n % columns] for n in range(rows * columns)]
    for axes in flat[len(titles) :]:
        axes.remove()
    for axes, title in zip(flat, titles, strict=False):
        axes.set_title(title)
    return figure, flat[: len(titles)]


def label_ends(
    axes: Axes, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, Look]
) -> None:
    """Names at the last points of the lines, moved apart where they would touch."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.075
    height = float("-inf")
    for name, (x, y) in sorted(ends.items(), key=lambda end: end[1][1]):
        height = max(y, height + gap)
        axes.annotate(
            name, (x, height), xytext=(7, 0), textcoords="offset points",
            va="center", color=looks[name].color, annotation_clip=False,
        )  # fmt: skip


def thinned(loads: Sequence[str], most: int) -> list[str]:
    """At most `most` of them, evenly spaced, with the first and the last."""
    if len(loads) <= most:
        return list(loads)
    step = (len(loads) - 1) / (most - 1)
    return [loads[round(n * step)] for n in range(most)]

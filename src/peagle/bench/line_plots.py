"""Figures of acceptance: lines over K and over draft positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from peagle.bench import series
from peagle.bench.plot_style import Look, Plot, label_ends, look_of, panels
from peagle.bench.results import Results
from peagle.bench.settings import series_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TICKS = 8  # more would touch
Lines = Mapping[str, Mapping[int, float]]  # name -> x -> y


def acceptance_plot(results: Results) -> Plot | None:
    found = series.acceptance_by_k(results)
    top = max((y for lines in found.values() for by_k in lines.values() for y in by_k.values()),
              default=None)  # fmt: skip
    if top is None:
        return None

    def finish(axes: Axes) -> None:
        axes.set(xlabel="K (draft tokens a step)", ylabel="tokens a step with drafts")
        axes.set_ylim(1, top * 1.08)

    words = "; ".join(
        f"{workload}: "
        + ", ".join(f"{n} {max(by_k.values()):.2f} at best" for n, by_k in lines.items())
        for workload, lines in found.items()
    )
    return Plot(
        name="acceptance",
        title="Acceptance length by K",
        alt=f"Mean acceptance length by K. {words}.",
        note=(
            "Tokens that a step with drafts yields on average, the target's own token included. "
            "The axis starts at 1: nothing accepted. An n-gram drafter has no draft for many "
            "steps; those are not counted."
        ),
        draw=drawer(list(found), _lines_panel(results, found, finish)),
    )


def position_plot(results: Results) -> Plot | None:
    rates = series.per_position(results)
    if not rates:
        return None
    found = {
        workload: {name: dict(enumerate(values, start=1)) for name, values in lines.items()}
        for workload, lines in rates.items()
    }

    def finish(axes: Axes) -> None:
        axes.set(xlabel="draft position", ylabel="share of steps")
        axes.set_ylim(0, 1)

    words = "; ".join(
        f"{workload}: " + ", ".join(f"{n} {v[0]:.0%} at position 1" for n, v in lines.items())
        for workload, lines in rates.items()
    )
    return Plot(
        name="per_position",
        title="Acceptance by draft position",
        alt=f"Share of steps whose draft at each position was accepted. {words}.",
        note=(
            "Of the steps with drafts. A draft counts only if all before it were accepted. Each "
            "method at its largest K."
        ),
        draw=drawer(list(found), _lines_panel(results, found, finish)),
    )


def load_label(loads: Sequence[str]) -> str:
    rates = [load.endswith("/s") for load in loads]
    if all(rates):
        return "requests per second"
    return "requests at once, or per second (/s)" if any(rates) else "requests at once"


def drawer(titles: list[str], panel: Callable[[Axes, str], None]) -> Callable[[bool], Figure]:
    def draw(narrow: bool) -> Figure:
        figure, grid = panels(titles, narrow=narrow)
        for axes, title in zip(grid, titles, strict=True):
            panel(axes, title)
        return figure

    return draw


def _lines_panel(
    results: Results, found: Mapping[str, Lines], finish: Callable[[Axes], None]
) -> Callable[[Axes, str], None]:
    """Lines over whole numbers; a label such as `p-eagle K=7` looks like p-eagle."""
    names = list(series_names(results.cells).values())

    def panel(axes: Axes, workload: str) -> None:
        looks = {label: look_of(label.partition(" K=")[0], names) for label in found[workload]}
        for label, line in found[workload].items():
            draw_line(axes, list(line), list(line.values()), looks[label])
        ticks = sorted({x for line in found[workload].values() for x in line})
        ticks = ticks[:: 1 + len(ticks) // (MOST_TICKS + 1)]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        finish(axes)
        ends = {label: list(line.items())[-1] for label, line in found[workload].items()}
        label_ends(axes, ends, looks)

    return panel


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look) -> None:
    axes.plot(
        x, y, marker=look.marker, linestyle=look.line, color=look.color, markersize=5, linewidth=1.5
    )

"""The figure of speed-ups by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from peagle.bench import series
from peagle.bench.line_plots import draw_line, drawer, load_label
from peagle.bench.plot_style import Look, Plot, label_ends, look_of
from peagle.bench.results import Results
from peagle.bench.settings import load_key, series_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BESIDE = 0.07  # of the way to the next load, so that intervals do not hide each other


def speed_up_plot(results: Results) -> Plot | None:
    found = series.speed_ups(results)
    if not found:
        return None
    points = [p for lines in found.values() for line in lines.values() for p in line]
    loads = sorted({point.load for point in points}, key=load_key)
    names = list(series_names(results.cells).values())

    def draw_panel(axes: Axes, workload: str) -> None:
        top = 1.0
        ends: dict[str, tuple[float, float]] = {}
        looks: dict[str, Look] = {}
        for n, (name, points) in enumerate(found[workload].items()):
            aside = (n - (len(found[workload]) - 1) / 2) * BESIDE
            x = [loads.index(p.load) + aside for p in points]
            y = [p.gain.mean for p in points]
            _errors(axes, x, points, look_of(name, names))
            draw_line(axes, x, y, look_of(name, names))
            for position, value, point in list(zip(x, y, points, strict=True))[:-1]:
                _mark_k(axes, position, value, point.k)
            top = max(top, *y)
            label = f"{name} K={points[-1].k}"
            ends[label], looks[label] = (len(loads) - 1 + BESIDE, y[-1]), look_of(name, names)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_ylim(0, top * 1.25)  # an interval of few repeats may leave the panel
        axes.set_xlim(-0.25, len(loads) - 1 + 0.25)
        axes.set_xticks(range(len(loads)), loads)
        axes.set(xlabel=load_label(loads), ylabel="speed against none (x)")
        label_ends(axes, ends, looks)

    return Plot(
        name="speed_up",
        title="Speed-up by load",
        alt=f"Speed-up over no speculation by load. {_gains_in_words(found)}",
        note=(
            "Output tokens per second divided by those of method none under the same load. The "
            "small number at a point, or behind a name, is the K that was best there; upright "
            "bars are 95 % intervals. Below the black line speculation loses. Loads are not to "
            "scale."
        ),
        draw=drawer(list(found), draw_panel),
    )


def _errors(axes: Axes, x: Sequence[float], points: Sequence[series.SpeedUp], look: Look) -> None:
    for position, point in zip(x, points, strict=True):
        if point.gain.low is not None and point.gain.high is not None:
            axes.vlines(position, point.gain.low, point.gain.high, color=look.color, linewidth=1)


def _mark_k(axes: Axes, x: float, y: float, k: int) -> None:
    axes.annotate(str(k), (x, y), xytext=(5, 4), textcoords="offset points", ha="left", fontsize=7)


def _gains_in_words(found: Mapping[str, Mapping[str, Sequence[series.SpeedUp]]]) -> str:
    return "; ".join(
        f"{workload}: "
        + ", ".join(
            f"{name} {points[0].gain.mean:.2f}x at {points[0].load} "
            f"and {points[-1].gain.mean:.2f}x at {points[-1].load}"
            for name, points in lines.items()
        )
        for workload, lines in found.items()
    )

"""Figures of latency tails, one for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from peagle.bench import series, timings
from peagle.bench.cells import Quantiles
from peagle.bench.plot_style import (
    MOST_LOADS_NARROW,
    Plot,
    look_of,
    panels,
    thinned,
)
from peagle.bench.results import Results
from peagle.bench.settings import Names, Setting, series_names, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# metric -> title, unit, factor from seconds
METRICS = {
    "ttft": ("time to first token", "ms", 1e3),
    "tpot": ("time per output token", "ms", 1e3),
    "e2el": ("whole answer", "s", 1.0),
}
LATENCY = "latency_"  # the names of these figures begin with it
Tails = Mapping[Setting, Mapping[str, Quantiles]]


def latency_plots(results: Results) -> list[Plot]:
    """One for each workload."""
    made = [_latency_plot(results, workload) for workload in series.workloads(results)]
    return [plot for plot in made if plot is not None]


def _latency_plot(results: Results, workload: str) -> Plot | None:
    tails = {metric: timings.latency_tails(results, workload, metric) for metric in METRICS}
    tails = {metric: found for metric, found in tails.items() if found}
    if not tails:
        return None
    loads, names = series.loads(results), series_names(results.cells)

    def draw(narrow: bool) -> Figure:
        titles = [f"{METRICS[m][0]} ({METRICS[m][1]})" for m in tails]
        shown = thinned(loads, MOST_LOADS_NARROW if narrow else 2 * MOST_LOADS_NARROW)
        figure, grid = panels(titles, narrow=narrow)
        for axes, (metric, found) in zip(grid, tails.items(), strict=True):
            _tail_panel(axes, found, shown, names, METRICS[metric][2])
        _method_legend(figure, list(next(iter(tails.values()))), names, narrow=narrow)
        return figure

    slowest = next(iter(tails.get("e2el", tails[next(iter(tails))]).items()))
    last = list(slowest[1])[-1]
    return Plot(
        name=f"{LATENCY}{_file_name(workload)}",
        title=f"Latency tails: {workload}",
        alt=f"Latencies of {workload} by load and method; the table below has every figure. "
        f"{short_name(slowest[0], names)} at load {last}: whole answer "
        f"p50 {slowest[1][last].p50:.2f} s, p99 {slowest[1][last].p99:.2f} s.",
        note="The marker is p50, the short bar p95, the end of the line p99. Each method at the K "
        "that is fastest over the whole grid.",
        draw=draw,
    )


def _tail_panel(
    axes: Axes,
    found: Tails,
    loads: Sequence[str],
    names: Names,
    factor: float,
) -> None:
    width = 0.8 / len(found)
    for n, (setting, by_load) in enumerate(found.items()):
        look = look_of(names[setting.series], list(names.values()))
        known = [(place, by_load[load]) for place, load in enumerate(loads) if load in by_load]
        x = [place + (n + 0.5) * width - 0.4 for place, _ in known]
        p50, p95, p99 = ([getattr(q, p) * factor for _, q in known] for p in ("p50", "p95", "p99"))
        axes.vlines(x, p50, p99, color=look.color, linewidth=1.2)
        ends = [[center + side * width / 4 for center in x] for side in (-1, 1)]
        axes.hlines(p95, ends[0], ends[1], color=look.color)
        axes.plot(x, p50, look.marker, color=look.color, markersize=4.5)
    slowest = max(q.p99 for by_load in found.values() for q in by_load.values())
    axes.set_ylim(0, slowest * factor * 1.08)
    axes.set_xlim(-0.5, len(loads) - 0.5)
    axes.set_xticks(range(len(loads)), loads)
    axes.set_xlabel("load")


def _method_legend(
    figure: Figure,
    settings: Sequence[Setting],
    names: Names,
    *,
    narrow: bool,
) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for setting in settings:
        look = look_of(names[setting.series], list(names.values()))
        label = short_name(setting, names)
        handles.append(
            Line2D([], [], marker=look.marker, color=look.color, linestyle="", label=label)
        )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2 if narrow else 4, frameon=False
    )


def _file_name(workload: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in workload).strip("_") or "workload"

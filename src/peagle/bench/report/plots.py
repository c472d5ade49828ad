"""The figures of a report: speed-ups by load, acceptance by K and by draft position, latency tails,
and where the time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from peagle.bench.analysis import series
from peagle.bench.report.plot_style import (
    MOST_LOADS_NARROW,
    PART_LOOKS,
    Look,
    Plot,
    label_ends,
    look_of,
    panels,
    thinned,
)
from peagle.bench.results.document import Quantiles, Results
from peagle.bench.results.figures import factor, quantity
from peagle.bench.results.settings import Names, Setting, load_key, series_names, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_OF_KS = 11  # points
BESIDE = 0.07  # of the way to the next load, so that intervals do not hide each other
MOST_TICKS = 8  # more would touch
MOST_TIME_PANELS = 6
Lines = Mapping[str, Mapping[int, float]]  # name -> x -> y
# metric -> title, unit, factor from seconds
METRICS = {
    "ttft": ("time to first token", "ms", 1e3),
    "tpot": ("time per output token", "ms", 1e3),
    "e2el": ("whole answer", "s", 1.0),
}
LATENCY = "latency_"  # the names of these figures begin with it
Tails = Mapping[Setting, Mapping[str, Quantiles]]


def all_plots(results: Results) -> list[Plot]:
    """Those that the results have figures for."""
    made = [
        speed_up_plot(results),
        acceptance_plot(results),
        position_plot(results),
        *latency_plots(results),
        time_plot(results),
    ]
    return [plot for plot in made if plot is not None]


def speed_up_plot(results: Results) -> Plot | None:
    found = series.speed_ups(results)
    if not found:
        return None
    points = [p for lines in found.values() for line in lines.values() for p in line]
    loads = sorted({point.load for point in points}, key=load_key)
    names = list(series_names(results.cells).values())

    lowest = min(point.gain.value for point in points)

    def draw_panel(axes: Axes, workload: str) -> None:
        top, lines = 1.0, found[workload]
        looks = {name: look_of(name, names) for name in lines}
        for n, (name, points) in enumerate(lines.items()):
            aside = (n - (len(lines) - 1) / 2) * BESIDE
            x = [loads.index(p.load) + aside for p in points]
            y = [p.gain.value for p in points]
            _errors(axes, x, points, looks[name])
            draw_line(axes, x, y, looks[name])
            _row_of_ks(axes, n, name, points, loads, looks[name])
            top = max(top, *y)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_ylim(min(0.9, 0.95 * lowest), top * 1.12)  # intervals of few repeats may leave it
        axes.set_xlim(-0.25, len(loads) - 1 + 0.25)
        axes.set_xticks(range(len(loads)), loads)
        axes.set(ylabel="speed against none (x)")
        axes.set_xlabel(load_label(loads), labelpad=4 + ROW_OF_KS * len(lines))
        ends = {
            name: (len(loads) - 1 + BESIDE, line[-1].gain.value) for name, line in lines.items()
        }
        label_ends(axes, ends, looks)

    return Plot(
        name="speed_up",
        title="Speed-up by load",
        alt=f"Speed-up over no speculation by load. {_gains_in_words(found)}",
        note=(
            "Output tokens per second divided by those of method none under the same load; upright "
            "bars are 95 % intervals. Below the axis stands the K that was fastest at each load. "
            "Below the black line speculation loses. Loads are not to scale."
        ),
        draw=drawer(list(found), draw_panel),
    )


def _row_of_ks(
    axes: Axes,
    number: int,
    name: str,
    points: Sequence[series.SpeedUp],
    loads: Sequence[str],
    look: Look,
) -> None:
    """Each point's K, in a row of its own below the axis: beside the points they would touch."""
    height = -(18 + ROW_OF_KS * number)  # points below the axis
    here = axes.get_xaxis_transform()
    words = [(loads.index(point.load), str(point.k or "any"), "center") for point in points]
    for x, word, align in ((-0.3, f"{name}  K", "right"), *words):
        axes.annotate(
            word, (x, 0), xycoords=here, xytext=(0, height), textcoords="offset points",
            ha=align, va="top", fontsize=8, color=look.color, annotation_clip=False,
        )  # fmt: skip


def _errors(axes: Axes, x: Sequence[float], points: Sequence[series.SpeedUp], look: Look) -> None:
    for position, point in zip(x, points, strict=True):
        if point.gain.low is not None and point.gain.high is not None:
            axes.vlines(position, point.gain.low, point.gain.high, color=look.color, linewidth=1)


def _gains_in_words(found: Mapping[str, Mapping[str, Sequence[series.SpeedUp]]]) -> str:
    return "; ".join(
        f"{workload}: "
        + ", ".join(
            f"{name} {factor(points[0].gain)} at {points[0].load} "
            f"and {factor(points[-1].gain)} at {points[-1].load}"
            for name, points in lines.items()
        )
        for workload, lines in found.items()
    )


def acceptance_plot(results: Results) -> Plot | None:
    found = series.acceptance_by_k(results)
    top = max((y for lines in found.values() for by_k in lines.values() for y in by_k.values()),
              default=None)  # fmt: skip
    if top is None:
        return None

    def finish(axes: Axes) -> None:
        axes.set(xlabel="K (draft tokens per step)", ylabel="tokens per step with drafts")
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


def latency_plots(results: Results) -> list[Plot]:
    """One for each workload."""
    made = [_latency_plot(results, workload) for workload in series.workloads(results)]
    return [plot for plot in made if plot is not None]


def _latency_plot(results: Results, workload: str) -> Plot | None:
    tails = {metric: series.latency_tails(results, workload, metric) for metric in METRICS}
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
        f"p50 {quantity(slowest[1][last].p50)} s, p99 {quantity(slowest[1][last].p99)} s.",
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


def time_plot(results: Results) -> Plot | None:
    found = series.time_breakdown(results)
    if not found:
        return None
    names, loads = series_names(results.cells), thinned(list(found), MOST_TIME_PANELS)
    bars = [bar for load in loads for bar in found[load]]
    unit, scale = ("ms", 1e3) if max(bar.total for bar in bars) >= 1e-3 else ("µs", 1e6)
    parts = [part for part in series.PARTS if any(getattr(bar, part) for bar in bars)]

    def draw(narrow: bool) -> Figure:
        across = 3 if len(loads) != 4 else 2
        figure, grid = panels([f"load {load}" for load in loads], narrow=narrow, across=across)
        for axes, load in zip(grid, loads, strict=True):
            _time_panel(axes, found[load], parts, names, scale)
            axes.set_xlabel(f"{unit} per output token")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return figure

    words = "; ".join(
        f"load {load}: "
        + ", ".join(
            f"{short_name(b.setting, names)} {quantity(b.total * scale)} {unit}"
            for b in found[load]
        )
        for load in loads
    )
    drafting = "" if "draft" in parts else " and drafting, which run as one graph here"
    return Plot(
        name="time",
        title="Where the time goes",
        alt=f"Engine time per output token, split into {', '.join(parts)}. {words}.",
        note="Engine time per output token, over all workloads: shorter is faster. Each method at "
        f"the K that is fastest over the whole grid. verify includes prefill{drafting}; other is "
        "scheduling, sampling and text.",
        draw=draw,
    )


def _time_panel(
    axes: Axes,
    bars: Sequence[series.Breakdown],
    parts: Sequence[str],
    names: Names,
    scale: float,
) -> None:
    left = [0.0] * len(bars)
    for part in parts:
        color, hatch = PART_LOOKS[part]
        values = [getattr(bar, part) * scale for bar in bars]
        axes.barh(
            range(len(bars)), values, left=left, label=part, color=color, hatch=hatch,
            edgecolor="black", linewidth=0.8, height=0.6,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, values, strict=True)]
    for n, bar in enumerate(bars):
        axes.annotate(quantity(bar.total * scale), (left[n], n), xytext=(3, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(bars)), [short_name(bar.setting, names) for bar in bars])
    axes.set_xlim(0, max(left) * 1.18)
    axes.locator_params(axis="x", nbins=5)
    axes.invert_yaxis()
    axes.grid(visible=False)

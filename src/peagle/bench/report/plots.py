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
from peagle.bench.results.settings import Names, Setting, load_key, series_names, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BESIDE = 0.07  # of the way to the next load, so that intervals do not hide each other
MOST_TICKS = 8  # more would touch
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

    def draw_panel(axes: Axes, workload: str) -> None:
        top = 1.0
        ends: dict[str, tuple[float, float]] = {}
        looks: dict[str, Look] = {}
        for n, (name, points) in enumerate(found[workload].items()):
            aside = (n - (len(found[workload]) - 1) / 2) * BESIDE
            x = [loads.index(p.load) + aside for p in points]
            y = [p.gain.value for p in points]
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
            f"{name} {points[0].gain.value:.2f}x at {points[0].load} "
            f"and {points[-1].gain.value:.2f}x at {points[-1].load}"
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


def time_plot(results: Results) -> Plot | None:
    found = series.time_breakdown(results)
    if not found:
        return None
    names, loads = series_names(results.cells), thinned(list(found), 3)

    def draw(narrow: bool) -> Figure:
        figure, grid = panels([f"load {load}" for load in loads], narrow=narrow)
        for axes, load in zip(grid, loads, strict=True):
            _time_panel(axes, found[load], names)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return figure

    words = "; ".join(
        f"load {load}: "
        + ", ".join(f"{short_name(b.setting, names)} {b.total * 1e3:.2f} ms" for b in found[load])
        for load in loads
    )
    return Plot(
        name="time",
        title="Where the time goes",
        alt=f"Milliseconds of engine time per output token, split into drafting, verification and "
        f"the rest. {words}.",
        note="Engine time per output token, over all workloads: shorter is faster. Verification "
        "includes prefill. The rest is scheduling, sampling and text.",
        draw=draw,
    )


def _time_panel(
    axes: Axes,
    bars: Sequence[series.Breakdown],
    names: Names,
) -> None:
    left = [0.0] * len(bars)
    for part in series.PARTS:
        color, hatch = PART_LOOKS[part]
        values = [getattr(bar, part) * 1e3 for bar in bars]
        axes.barh(
            range(len(bars)), values, left=left, label=part, color=color, hatch=hatch,
            edgecolor="black", linewidth=0.8, height=0.6,
        )  # fmt: skip
        left = [a + b for a, b in zip(left, values, strict=True)]
    for n, bar in enumerate(bars):
        axes.annotate(f"{bar.total * 1e3:.2f}", (left[n], n), xytext=(3, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    axes.set_yticks(range(len(bars)), [short_name(bar.setting, names) for bar in bars])
    axes.set_xlim(0, max(left) * 1.18)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xlabel("ms per output token")

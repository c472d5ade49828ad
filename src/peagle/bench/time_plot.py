"""The figure of where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peagle.bench import timings
from peagle.bench.plot_style import PART_LOOKS, Plot, panels, thinned
from peagle.bench.results import Results
from peagle.bench.settings import Names, series_names, short_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def time_plot(results: Results) -> Plot | None:
    found = timings.time_breakdown(results)
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
    bars: Sequence[timings.Breakdown],
    names: Names,
) -> None:
    left = [0.0] * len(bars)
    for part in timings.PARTS:
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

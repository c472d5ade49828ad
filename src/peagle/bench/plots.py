"""The figures of a report, in their order."""

from __future__ import annotations

from peagle.bench.latency_plots import latency_plots
from peagle.bench.line_plots import acceptance_plot, position_plot
from peagle.bench.plot_style import Plot
from peagle.bench.results import Results
from peagle.bench.speed_plot import speed_up_plot
from peagle.bench.time_plot import time_plot


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

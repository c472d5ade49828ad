"""Figures: the right numbers behind them, readable without colour, two widths."""

from __future__ import annotations

import builtins
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from peagle.bench.analysis import series
from peagle.bench.report.plot_style import LOOKS, NARROW, SPARE, STYLE, WIDE, look_of, render
from peagle.bench.report.plots import all_plots, load_label, speed_up_plot, time_plot
from peagle.bench.results.document import Results
from peagle.bench.results.settings import Setting
from peagle.errors import ConfigError

from ..made import HEAD, HEADS, RATES, make_cell, make_results, modelled_grid


@pytest.fixture(scope="module")
def grid() -> Results:
    return modelled_grid()


def test_a_full_grid_has_every_figure(grid: Results) -> None:
    assert [plot.name for plot in all_plots(grid)] == [
        "speed_up", "acceptance", "per_position", "latency_chat", "latency_code", "time",
    ]  # fmt: skip
    for plot in all_plots(grid):
        assert len(plot.alt) > 40
        assert plot.note.endswith(".")


def test_results_without_counters_or_clocks_have_fewer_figures() -> None:
    bare = make_results([make_cell(), make_cell("p-eagle", 5, (150.0, 151.0))])
    assert [plot.name for plot in all_plots(bare)] == ["speed_up", "latency_chat"]
    assert all_plots(make_results([])) == []


def test_speed_ups_are_of_the_best_k_under_each_load(grid: Results) -> None:
    points = series.speed_ups(grid)["chat"]["p-eagle"]
    assert [p.load for p in points] == ["1", "4", "16"]
    cells = {
        c.num_speculative_tokens: s.otps.value
        for c in grid.cells
        if c.workload == "chat" and c.concurrency == 4 and (s := c.summary())
        if c.method in ("none", "p-eagle")
    }
    best = max((k for k in cells if k), key=cells.__getitem__)
    assert points[1].k == best
    assert points[1].gain.value == pytest.approx(cells[best] / cells[0], rel=0.001)


def test_acceptance_counts_all_loads_together(grid: Results) -> None:
    by_k = series.acceptance_by_k(grid)["chat"]["p-eagle"]
    rate = RATES["p-eagle"]
    assert by_k[3] == pytest.approx(1 + rate + rate**2 + rate**3, abs=0.01)
    assert list(by_k) == [1, 3, 5, 7]


def test_positions_are_those_of_the_deepest_k(grid: Results) -> None:
    rates = series.per_position(grid)["chat"]
    assert set(rates) == {"ngram K=7", "eagle3 K=7", "p-eagle K=7"}
    assert rates["p-eagle K=7"] == pytest.approx([0.75**n for n in range(1, 8)], abs=0.01)


def test_the_parts_of_the_time_add_up_to_the_engines_time_per_token(grid: Results) -> None:
    bars = series.time_breakdown(grid)["1"]
    assert [bar.setting.method for bar in bars] == ["none", "ngram", "eagle3", "p-eagle"]
    assert bars[0].draft == 0
    # none at one request: 21 ms of verification and 1 ms of the rest for each token
    assert (bars[0].verify, bars[0].other) == pytest.approx((0.021, 0.001))
    assert bars[3].total < bars[0].total


def test_a_partial_grid_is_represented_by_what_was_measured_most() -> None:
    cells = [
        make_cell("p-eagle", 5, [100.0], concurrency=1),
        make_cell("p-eagle", 5, [400.0], concurrency=4),
        make_cell("p-eagle", 7, [500.0], concurrency=4),
    ]
    assert series.representatives(make_results(cells)) == [Setting("p-eagle", 5, HEAD)]


def test_every_method_has_its_own_marker_and_line() -> None:
    looks = [*LOOKS.values(), *SPARE]
    assert len({look.marker for look in looks}) == len(looks)
    assert len({look.line for look in looks}) == len(looks)
    names = ["none", "p-eagle (a)", "p-eagle (b)", "mine", "yours"]
    found = [look_of(name, names) for name in names]
    assert found[1] == LOOKS["p-eagle"]
    assert len({look.marker for look in found}) == len(names)


def test_bars_differ_without_colour(grid: Results) -> None:
    plot = time_plot(grid)
    assert plot is not None
    bars = plot.draw(False).axes[0].patches
    assert len({(bar.get_hatch(), bar.get_facecolor()) for bar in bars}) == 3
    lightness = {round(sum(bar.get_facecolor()[:3]), 2) for bar in bars}
    assert len(lightness) == 3


def test_speed_axes_hold_one_and_name_their_lines(grid: Results) -> None:
    plot = speed_up_plot(grid)
    assert plot is not None
    for narrow in (False, True):
        figure = plot.draw(narrow)
        assert figure.get_size_inches()[0] == (NARROW if narrow else WIDE)
        for axes in figure.axes:
            assert axes.get_ylim()[0] < 1 < axes.get_ylim()[1]
            assert axes.get_ylabel() == "speed against none (x)"
            words = {text.get_text().partition(" K=")[0] for text in axes.texts}
            assert {"ngram", "eagle3", "p-eagle"} <= words


@pytest.mark.parametrize("narrow", [False, True])
def test_words_of_a_plot_do_not_touch_each_other(grid: Results, narrow: bool) -> None:
    plot = speed_up_plot(grid)
    assert plot is not None
    with matplotlib.rc_context(STYLE):
        figure = plot.draw(narrow)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    for axes in figure.axes:
        words = [*axes.texts, *axes.get_xticklabels(), axes.xaxis.label]
        ks = {(p.load, p.k) for line in series.speed_ups(grid)[axes.get_title("left")].values()
              for p in line}  # fmt: skip
        assert {word.get_text() for word in axes.texts} >= {str(k) for _, k in ks}
        boxes = [word.get_window_extent(canvas.get_renderer()) for word in words]
        touching = [
            (a.get_text(), b.get_text())
            for (a, box), (b, other) in combinations(zip(words, boxes, strict=True), 2)
            if box.shrunk(0.9, 0.7).overlaps(other.shrunk(0.9, 0.7))
        ]
        assert touching == []


def test_a_picture_that_stands_alone_says_what_was_measured(grid: Results) -> None:
    for plot in all_plots(grid):
        svg = render(plot, heading="smollm2-135m: NVIDIA H200").decode()
        assert plot.title in svg
        assert "smollm2-135m: NVIDIA H200" in svg
        assert " ".join(plot.note.split()[:4]) in svg


def test_the_time_plot_shows_every_load_and_only_parts_that_took_time() -> None:
    results = modelled_grid(workloads=("chat",), loads=(1, 8, 32, 128), ks=(3,))
    cells = [
        replace(
            cell, repeats=[replace(r, stats=r.stats | {"draft_time": 0.0}) for r in cell.repeats]
        )
        for cell in results.cells
    ]
    for found, parts in ((results, 3), (replace(results, cells=cells), 2)):
        plot = time_plot(found)
        assert plot is not None
        figure = plot.draw(False)
        assert [axes.get_title() for axes in figure.axes] == [
            "load 1", "load 8", "load 32", "load 128",
        ]  # fmt: skip
        assert len(figure.legends[0].get_texts()) == parts
        assert ("drafting" in plot.note) == (parts == 2)
        totals = [text.get_text() for text in figure.axes[-1].texts]
        assert len(set(totals)) == len(totals), "bars that differ have labels that differ"


def test_one_panel_does_not_fill_the_page() -> None:
    plot = speed_up_plot(modelled_grid(workloads=("chat",), loads=(1, 2)))
    assert plot is not None
    assert plot.draw(False).get_size_inches()[0] < WIDE


@pytest.mark.slow
def test_the_same_results_give_the_same_picture_without_a_date(grid: Results) -> None:
    plot = all_plots(grid)[0]
    svg = render(plot)
    assert svg == render(plot)
    assert b"<dc:date>" not in svg
    assert not re.search(rb"(href|src)=\"http", svg)
    assert render(plot, file_format="png").startswith(b"\x89PNG")


def test_hostile_names_do_not_break_a_picture() -> None:
    name = '$\\frac{<b>&"$'
    cells = [make_cell(workload=name), make_cell("p-eagle", 5, workload=name)]
    svg = render(all_plots(make_results(cells))[0]).decode()
    assert "<b>" not in svg
    assert "&lt;b" in svg


def test_loads_are_named_by_what_they_are() -> None:
    assert load_label(["1", "4"]) == "requests at once"
    assert load_label(["0.5/s"]) == "requests per second"
    assert "or" in load_label(["1", "2/s"])


def test_a_missing_matplotlib_is_one_line_with_a_hint(
    grid: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="matplotlib") as caught:
        render(all_plots(grid)[0])
    assert "peagle[plots]" in str(caught.value.hint)


def test_request_rates_are_drawn_beside_concurrencies() -> None:
    rated = [
        replace(cell, concurrency=None, request_rate=2.5)
        for cell in (make_cell(), make_cell("eagle3", 3, (150.0, 152.0)))
    ]
    results = make_results([make_cell(), make_cell("eagle3", 3), *rated])
    assert series.loads(results) == ["1", "2.5/s"]
    assert {cell.head for cell in rated} == {None, HEADS["eagle3"]}
    assert [p.load for p in series.speed_ups(results)["chat"]["eagle3"]] == ["1"]
    assert set(series.latency_tails(results, "chat", "ttft")[Setting("none", 0)]) == {"1", "2.5/s"}
    assert render(all_plots(results)[0])

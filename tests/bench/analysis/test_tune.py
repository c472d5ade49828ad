"""What to run: the fastest that surely gains, off where nothing does, ties named."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.analysis.gains import gains_at, mixed_speeds, scatter_of, unpaired_ratio
from peagle.bench.analysis.series import speed_ups
from peagle.bench.analysis.tune import cost_of, peagle_config, tune, vllm_config
from peagle.bench.report.tables import speed_tables
from peagle.bench.results.figures import factor
from peagle.bench.results.intervals import Interval
from peagle.bench.results.settings import Setting, by_place, distinct_names, series_names
from peagle.cli.bench import print_results
from peagle.config import SpeculativeConfig
from peagle.errors import DataError

from ..made import HEAD, make_cell, make_results, modelled_grid

NONE = make_cell("none", 0, (100.0, 102.0, 98.0))


def numbered(row: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(row))


def test_the_fastest_setting_is_advised_with_its_gain_over_none() -> None:
    slow = make_cell("p-eagle", 3, (150.0, 153.0, 147.0))
    fast = make_cell("p-eagle", 5, (200.0, 205.0, 195.0))
    advice = tune(make_results([slow, fast, NONE])).overall
    assert advice.best.setting == Setting("p-eagle", 5, HEAD)
    assert advice.best.gain.value == pytest.approx(2.0, rel=1e-3)
    assert not advice.off
    assert advice.tied == ()
    assert [c.name for c in advice.choices] == ["p-eagle K=5", "p-eagle K=3", "none"]


def test_a_gain_whose_interval_holds_one_means_off() -> None:
    noisy = make_cell("p-eagle", 5, (140.0, 90.0, 110.0))
    advice = tune(make_results([noisy, NONE])).overall
    assert advice.off
    assert advice.best.setting.method == "none"
    assert "may be noise" in advice.why
    assert [c.name for c in advice.tied] == ["p-eagle K=5"], "the fastest itself is as good"


def test_a_loss_means_off() -> None:
    slower = make_cell("p-eagle", 5, (50.0, 51.0, 49.0))
    advice = tune(make_results([slower, NONE])).overall
    assert advice.off
    assert advice.tied == ()


def test_scatter_is_pooled_so_that_a_calm_setting_is_no_surer_than_the_rest() -> None:
    # Two repeats: the slow one seems exact by chance, the fast one gains far more than the noise.
    plain, calm = make_cell(speeds=(100.0, 110.0)), make_cell("ngram", 3, (116.0, 127.6))
    fast = [make_cell("p-eagle", k, (200.0 + k, 190.0 - k)) for k in (3, 5, 7)]
    advice = tune(make_results([plain, calm, *fast])).overall
    assert advice.best.name.startswith("p-eagle")
    assert not advice.off


def test_the_scatter_of_two_rows_is_that_of_the_paired_t_test() -> None:
    new, base = (150.0, 121.0, 90.0), (100.0, 80.0, 61.0)
    logs = [math.log(a / b) for a, b in zip(new, base, strict=True)]
    half = 1.16 * 4.302653 * stdev(logs) / math.sqrt(3)
    rows = [numbered(new), numbered(base)]
    ratio = scatter_of(rows).ratio(*rows)
    assert ratio.low == pytest.approx(math.exp(median(logs) - half))
    assert ratio.high == pytest.approx(math.exp(median(logs) + half))


@pytest.mark.parametrize("drift", [0.0, 0.1], ids=["steady", "drifting"])
def test_the_interval_of_a_gain_holds_it_at_least_as_often_as_it_says(drift: float) -> None:
    generator = np.random.default_rng(0)
    rounds = generator.normal(0.0, drift, (600, 1, 3))
    logs = generator.normal(0.0, 0.02, (600, 5, 3)) + rounds
    held = 0
    for grid in np.exp(logs).tolist():
        rows = [numbered(row) for row in grid]
        ratio = scatter_of(rows).ratio(rows[1], rows[0])
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 1.0 <= ratio.high
    assert 0.93 < held / 600 < 0.995


def test_one_disturbed_repeat_does_not_move_a_gain() -> None:
    base, new = numbered((36.9, 1.1, 37.2)), numbered((55.0, 56.1, 54.8))
    assert scatter_of([base, new]).ratio(new, base).value == pytest.approx(55.0 / 36.9)


def test_a_row_that_was_cut_short_does_not_shorten_the_others() -> None:
    speeds = [(100.0, 103.0, 98.0), (150.0, 151.0, 149.0), (120.0,)]
    rows = [numbered(row) for row in speeds]
    assert scatter_of(rows) == scatter_of(rows[:2])
    assert scatter_of(rows).ratio(rows[2], rows[0]).low is None
    assert scatter_of(rows[:1]).variance is None
    assert scatter_of([{0: 1.0}, {0: 2.0}]).variance is None


def test_repeats_are_compared_with_those_of_the_same_round() -> None:
    # The machine gets slower from round to round, and one method lost its second.
    base, new = {0: 100.0, 1: 80.0, 2: 60.0}, {0: 150.0, 2: 90.0}
    assert scatter_of([base, new]).ratio(new, base).value == pytest.approx(1.5)
    apart = scatter_of([{0: 100.0}, {1: 150.0}]).ratio({1: 150.0}, {0: 100.0})
    assert (apart.value, apart.low) == (pytest.approx(1.5), None)


def test_tables_figures_and_advice_have_one_gain() -> None:
    # Mean of ratios, ratio of means and ratio of medians all differ here.
    cells = [make_cell(speeds=(100.0, 50.0, 90.0)), make_cell("p-eagle", 5, (150.0, 140.0, 100.0))]
    results = make_results(cells)
    advised = {c.setting: c.gain for c in tune(results).overall.choices}
    ((place, at_place),) = by_place(results.cells).items()
    assert gains_at(place, at_place) == advised
    (point,) = speed_ups(results)["chat"]["p-eagle"]
    assert point.gain == advised[Setting("p-eagle", 5, HEAD)]
    printed = io.StringIO()
    print_results(results, file=printed)
    assert factor(point.gain) in printed.getvalue()
    assert factor(point.gain) in speed_tables(results)


def test_no_gain_is_shown_under_a_request_rate() -> None:
    rated = [replace(make_cell(method, k), concurrency=None, request_rate=2.5)
             for method, k in (("none", 0), ("p-eagle", 5))]  # fmt: skip
    printed = io.StringIO()
    print_results(make_results(rated), file=printed)
    assert "2.5/s" in printed.getvalue()
    assert "1.00x" not in printed.getvalue()
    assert "&times;" not in speed_tables(make_results(rated))


def test_choices_within_each_others_noise_are_tied() -> None:
    one = make_cell("p-eagle", 5, (200.0, 190.0, 210.0))
    other = make_cell("p-eagle", 7, (199.0, 201.0, 198.0))
    advice = tune(make_results([one, other, NONE])).overall
    assert advice.best.name == "p-eagle K=5"
    assert [c.name for c in advice.tied] == ["p-eagle K=7"]


def test_drift_that_hits_all_methods_does_not_widen_the_gain() -> None:
    # The machine gets slower from repeat to repeat; the ratio of neighbours stays.
    plain = make_cell("none", 0, (100.0, 80.0, 60.0))
    fast = make_cell("p-eagle", 5, (150.0, 121.0, 90.0))
    gain = tune(make_results([plain, fast])).overall.best.gain
    assert gain.low is not None
    assert gain.low > 1.45


def test_one_repeat_has_no_interval_and_says_so() -> None:
    tuning = tune(make_results([make_cell(speeds=[100.0]), make_cell("ngram", 3, [130.0])]))
    assert tuning.overall.best.gain.low is None
    assert not tuning.overall.off
    assert any("1 repeat only" in note for note in tuning.notes)
    assert tuning.overall.tied == ()
    assert tuning.overall.tied_names == "not known"


def test_none_alone_is_no_advice_against_drafters() -> None:
    tuning = tune(make_results([NONE]))
    assert tuning.overall.why == "no drafter was measured"
    assert tuning.notes == ()  # it has three repeats
    with pytest.raises(DataError, match="nothing was measured yet"):
        tune(make_results([]))


def test_each_load_and_workload_gets_its_own_advice() -> None:
    cells = [
        make_cell("none", 0, workload="chat", concurrency=1),
        make_cell("none", 0, workload="code", concurrency=1),
        make_cell("none", 0, workload="chat", concurrency=64),
        make_cell("none", 0, workload="code", concurrency=64),
        make_cell("p-eagle", 5, (180.0, 181.0, 179.0), workload="chat", concurrency=1),
        make_cell("p-eagle", 5, (240.0, 241.0, 239.0), workload="code", concurrency=1),
        make_cell("p-eagle", 5, (50.0, 51.0, 49.0), workload="chat", concurrency=64),
        make_cell("p-eagle", 5, (80.0, 81.0, 79.0), workload="code", concurrency=64),
    ]
    tuning = tune(make_results(cells))
    assert [(a.load, a.off) for a in tuning.by_load] == [("1", False), ("64", True)]
    assert [(a.workload, a.load) for a in tuning.by_place] == [
        ("chat", "1"), ("chat", "64"), ("code", "1"), ("code", "64"),
    ]  # fmt: skip
    # 1000 tokens each: 2000 / (1000 / 180 + 1000 / 240) = 205.7, not the mean 210
    assert tuning.by_load[0].best.otps.value == pytest.approx(205.7, rel=1e-3)


def test_workloads_count_by_their_tokens() -> None:
    few = make_cell(speeds=[100.0], workload="few", num_tokens=100)
    many = make_cell(speeds=[50.0], workload="many", num_tokens=300)
    assert mixed_speeds([few, many], [100, 300]) == {0: pytest.approx(400 / 7)}
    overall = tune(make_results([few, many])).overall
    assert overall.plain.otps.value == pytest.approx(400 / 7)


def test_a_setting_that_was_not_measured_everywhere_does_not_compete_overall() -> None:
    cells = [
        make_cell("none", 0, workload="chat"),
        make_cell("none", 0, workload="code"),
        make_cell("p-eagle", 9, (900.0, 901.0, 899.0), workload="chat"),
        make_cell("p-eagle", 5, (150.0, 151.0, 149.0), workload="chat"),
        make_cell("p-eagle", 5, (150.0, 151.0, 149.0), workload="code"),
    ]
    tuning = tune(make_results(cells))
    assert tuning.overall.best.name == "p-eagle K=5"
    assert tuning.by_place[0].best.name == "p-eagle K=9"


def test_places_without_none_are_left_out_and_named() -> None:
    cells = [NONE, make_cell("p-eagle", 5, workload="code")]
    assert any("code at 1" in note for note in tune(make_results(cells)).notes)
    with pytest.raises(DataError, match="method none"):
        tune(make_results(cells[1:]))


def test_request_rates_are_left_out_because_arrivals_set_their_speed() -> None:
    rated = [replace(make_cell(method, k), concurrency=None, request_rate=2.5)
             for method, k in (("none", 0), ("p-eagle", 5))]  # fmt: skip
    tuning = tune(make_results([NONE, make_cell("p-eagle", 5, (150.0, 151.0, 149.0)), *rated]))
    assert [a.load for a in tuning.by_load] == ["1"]
    assert not tuning.overall.off
    assert any("request rates" in note for note in tuning.notes)
    with pytest.raises(DataError, match="concurrency"):
        tune(make_results(rated))


def test_partial_repeats_give_way_to_whole_ones() -> None:
    broken = make_cell("p-eagle", 5, [10.0], partial=True)
    cell = replace(broken, repeats=[*broken.repeats, *make_cell(speeds=(200.0, 201.0)).repeats])
    tuning = tune(make_results([NONE, cell]))
    assert tuning.overall.best.otps.value == pytest.approx(200.5)
    assert any("partial" in note for note in tuning.notes)


def test_two_heads_of_one_method_are_told_apart_by_name() -> None:
    one = make_cell("p-eagle", 5, (150.0, 151.0, 149.0))
    two = replace(make_cell("p-eagle", 5, (200.0, 201.0, 199.0)), head="heads/other")
    names = [c.name for c in tune(make_results([NONE, one, two])).overall.choices]
    assert names == ["p-eagle (other) K=5", "p-eagle (smollm2-135m-p-eagle) K=5", "none"]


def test_two_heads_of_one_file_name_are_told_apart_by_their_folders() -> None:
    heads = ("runs/a/final", "runs/b/final")
    cells = [replace(make_cell("p-eagle", 5), head=head) for head in heads]
    names = series_names([NONE, *cells])
    assert list(names.values()) == ["none", "p-eagle (a/final)", "p-eagle (b/final)"]
    assert len(speed_ups(make_results([NONE, *cells]))["chat"]) == 2
    assert distinct_names(["x/h", "h", "h"]) == ["x/h", "h", "h"]  # the same one twice


def test_the_modelled_grid_gains_most_alone_and_least_in_a_crowd() -> None:
    gains = [a.best.gain.value for a in tune(modelled_grid(loads=(1, 4, 16, 64))).by_load]
    assert gains == sorted(gains, reverse=True)


def test_cost_follows_from_speed_and_price() -> None:
    cost = cost_of(100.0, gpu_dollars_per_hour=3.6, wanted_otps=301.0)
    assert cost.tokens_per_dollar == pytest.approx(100_000)
    assert cost.dollars_per_million_tokens == pytest.approx(10.0)
    assert cost.gpus_for_wanted_rate == 4
    assert cost_of(100.0, wanted_otps=300.0).gpus_for_wanted_rate == 3
    assert cost_of(100.0, num_gpus=8, wanted_otps=150.0).gpus_for_wanted_rate == 16


@pytest.mark.parametrize("method", ["p-eagle", "eagle3", "ngram"])
def test_the_printed_configs_are_read_as_the_same_setting(method: str) -> None:
    setting = Setting(method, 5, None if method == "ngram" else HEAD)
    for config in (peagle_config(setting), vllm_config(setting)):
        assert config is not None
        read = SpeculativeConfig.from_mapping(config)
        assert (read.method, read.model, read.num_speculative_tokens) == (method, setting.head, 5)


def test_vllm_is_told_p_eagle_in_its_own_words() -> None:
    assert vllm_config(Setting("p-eagle", 7, "org/head")) == {
        "method": "eagle3",
        "model": "org/head",
        "num_speculative_tokens": 7,
        "parallel_drafting": True,
    }
    assert vllm_config(Setting("none", 0)) is None


speeds = st.lists(st.floats(1.0, 1000.0), min_size=3, max_size=6)


@given(speeds, speeds, st.floats(0.1, 10.0))
def test_ratios_scale_and_turn_round(new: list[float], base: list[float], factor: float) -> None:
    def paired_ratio(new: Sequence[float], base: Sequence[float]) -> Interval:
        rows = [numbered(new[: len(base)]), numbered(base[: len(new)])]
        return scatter_of(rows).ratio(*rows)

    for ratio_of in (paired_ratio, unpaired_ratio):
        ratio, turned = ratio_of(new, base), ratio_of(base, new)
        assert ratio.low is not None
        assert ratio.high is not None
        assert turned.low is not None
        assert ratio.low <= ratio.value * (1 + 1e-9)
        assert ratio.high == pytest.approx(1 / turned.low, rel=1e-6)
        scaled = ratio_of([x * factor for x in new], base)
        assert scaled.value == pytest.approx(ratio.value * factor, rel=1e-6)
        assert scaled.low == pytest.approx(ratio.low * factor, rel=1e-6)

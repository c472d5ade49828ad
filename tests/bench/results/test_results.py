"""The results file: written, read back, refused where it is damaged; its intervals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.results.document import (
    AnswerDifference,
    Category,
    Cell,
    CellRun,
    Latencies,
    Lossless,
    Manifest,
    MeasuredHead,
    Quantiles,
    Results,
    Sample,
    SampleToken,
    WorkloadInfo,
    from_json,
    load_results,
    save_results,
)
from peagle.bench.results.intervals import (
    T_QUANTILES,
    median_interval,
    median_over_mean,
    percentile,
    t_quantile,
)
from peagle.errors import DataError

RUN = CellRun(
    otps=10.0,
    latencies=Latencies(ttft=Quantiles(1.0, 2.0, 3.0, 1.5)),
    num_requests=3,
    num_output_tokens=30,
    wall_s=3.0,
    stats={"num_drafts": 2, "mean_acceptance_length": 2.5},
    categories={"code": Category(3, 30, 2.5)},
)
RESULTS = Results(
    Manifest(
        provenance={"git": None},
        model="m",
        backend="embedded",
        dtype="float32",
        device="cpu",
        seed=0,
        max_tokens=64,
        temperature=0.0,
        num_repeats=2,
        heads=[MeasuredHead("h", "p-eagle")],
        workloads=[WorkloadInfo("w", "ab", 3)],
    ),
    [Cell("p-eagle", 5, "w", concurrency=1, head="x/h", repeats=[RUN, replace(RUN, otps=14.0)])],
    Lossless(2, 1, 0, [AnswerDifference("p-eagle", 5, "w", "1", 0, "p", 0, 3, 1, 2, 0.5)]),
    [Sample("w", "p", "q", "p-eagle", 5, [SampleToken("a", True)])],
)


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    save_results(RESULTS, tmp_path)
    assert load_results(tmp_path) == RESULTS
    assert load_results(tmp_path / "results.json") == RESULTS


def test_summary_stands_in_the_file_and_is_that_of_the_repeats() -> None:
    summary = RESULTS.to_json()["cells"][0]["summary"]
    assert summary["otps"]["value"] == 12.0
    assert summary["acceptance_length"] == 2.5


def test_summary_leaves_partial_runs_out_where_it_can() -> None:
    cut = replace(RUN, otps=1.0, partial=True)
    cell = replace(RESULTS.cells[0], repeats=[RUN, cut])
    summary = cell.summary()
    assert summary is not None
    assert (summary.otps.value, summary.num_repeats, summary.partial) == (10.0, 1, False)
    only = replace(cell, repeats=[cut]).summary()
    assert only is not None
    assert (only.otps.value, only.partial) == (1.0, True)
    assert replace(cell, repeats=[]).summary() is None


def test_names_of_a_cell() -> None:
    assert RESULTS.cells[0].label == "p-eagle (h)"
    assert Cell("none", 0, "w", request_rate=2.5).load == "2.5/s"


def damaged(change: dict[str, Any], *path: str | int) -> Any:
    document = json.loads(json.dumps(RESULTS.to_json()))
    place = document
    for key in path:
        place = place[key]
    place.update(change)
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a result of peagle bench"),
        (damaged({"version": 99}), "version 99"),
        (damaged({"otps": "fast"}, "cells", 0, "repeats", 0), r"repeats\[0\].otps is 'fast'"),
        (damaged({"otps": True}, "cells", 0, "repeats", 0), "otps is True, not a valid number"),
        (damaged({"modell": "x"}, "manifest"), r"manifest\.modell is an unknown key"),
        (damaged({"request_rate": 1.0}, "cells", 0), "concurrency or request_rate"),
        (damaged({"cells": 3}), "cells is 3"),
    ],
)
def test_damaged_file_is_refused_with_its_place(document: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_json(document, "r.json")


def test_missing_key_is_named() -> None:
    document = damaged({})
    del document["manifest"]["model"]
    with pytest.raises(DataError, match=r"manifest\.model is missing"):
        from_json(document, "r.json")


def test_missing_file_and_broken_json_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no results at"):
        load_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        load_results(tmp_path)


NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0.0, 1.0))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_the_interval_of_three_repeats_is_students_for_a_median() -> None:
    interval = median_interval([10.0, 14.0, 12.0])  # deviation 2, t(2) = 4.3027, root 3
    half = 1.16 * 4.302653 * 2.0 / 3**0.5
    assert (interval.value, interval.least, interval.most) == (12.0, 10.0, 14.0)
    assert (interval.low, interval.high) == pytest.approx((12.0 - half, 12.0 + half))
    assert interval.half_width == pytest.approx(half)


@pytest.mark.parametrize("values", [[10.0], [79_028.0, 67_537.0]])
def test_one_or_two_repeats_have_no_bounds(values: list[float]) -> None:
    interval = median_interval(values)
    assert (interval.low, interval.high, interval.half_width) == (None, None, None)
    assert interval.num_values == len(values)


def test_one_disturbed_repeat_leaves_the_figure_alone() -> None:
    assert median_interval([36.9, 1.1, 37.2]).value == 36.9


@pytest.mark.parametrize("repeats", [3, 5])
def test_the_interval_covers_the_median_at_least_as_often_as_it_says(repeats: int) -> None:
    samples = np.random.default_rng(0).normal(5.0, 1.0, (4000, repeats))
    found = [median_interval(values) for values in samples.tolist()]
    inside = [i.low <= 5.0 <= i.high for i in found]  # type: ignore[operator]
    assert 0.945 < np.mean(inside) < 0.985


@pytest.mark.parametrize("count", range(1, 9))
def test_a_median_scatters_as_much_more_than_a_mean_as_is_said(count: int) -> None:
    samples = np.random.default_rng(count).normal(0.0, 1.0, (200_000, count))
    ratio = np.median(samples, axis=1).std() / samples.mean(axis=1).std()
    assert ratio <= median_over_mean(count) * 1.01
    assert ratio == pytest.approx(median_over_mean(count), rel=0.01 if count < 8 else 0.1)


def test_quantile_goes_on_smoothly_beyond_the_table() -> None:
    last = len(T_QUANTILES)
    assert t_quantile(31) == pytest.approx(2.039513, abs=1e-4)
    assert t_quantile(100) == pytest.approx(1.983972, abs=1e-5)
    assert all(t_quantile(n) > t_quantile(n + 1) for n in range(1, last + 20))

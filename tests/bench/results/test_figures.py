"""Figures as people read them: thousands, three digits, none that the scatter does not allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.results import figures
from peagle.bench.results.intervals import Interval, median_interval


@pytest.mark.parametrize(
    ("value", "shown"),
    [(147_064.4, "147,000"), (1740.04, "1,740"), (958.4, "958"), (38.84, "38.8"), (2.306, "2.31"),
     (0.00699, "0.00699"), (0.0, "0"), (27_637_976, "27,600,000")],
)  # fmt: skip
def test_a_figure_has_three_digits_and_its_thousands_are_separated(
    value: float, shown: str
) -> None:
    assert figures.quantity(value) == shown


@pytest.mark.parametrize(
    ("value", "spread", "shown"),
    [(73_282.6, 8_500, "73,000"), (73_282.6, 1_200, "73,300"), (73_282.6, 40, "73,280"),
     (38.84, 0.02, "38.84"), (38.84, 2.1, "38.8"), (38.84, 5.0, "39"), (38.84, 60.0, "40")],
)  # fmt: skip
def test_digits_end_where_the_spread_begins(value: float, spread: float, shown: str) -> None:
    assert figures.quantity(value, spread) == shown


def test_three_repeats_have_an_interval_and_two_their_range() -> None:
    assert figures.with_spread(median_interval([38.0, 39.0, 38.8])) == "38.8 ± 1.6"
    assert figures.with_spread(median_interval([79_028.0, 67_537.0])) == "73,000 (68,000 to 79,000)"
    assert figures.with_spread(median_interval([45.69, 45.77])) == "45.7 (45.7 to 45.8)"
    assert figures.with_spread(median_interval([38.84])) == "38.8"
    assert figures.figure(median_interval([79_028.0, 67_537.0])) == "73,000"


def test_wild_repeats_are_shown_as_they_are_and_never_as_an_interval_below_zero() -> None:
    assert figures.with_spread(median_interval([1.1, 36.9, 37.2])) == "37 (1 to 37)"


def test_gains_have_bounds_or_say_how_few_repeats_there_were() -> None:
    assert figures.factor_with_bounds(Interval(1.523, 1.481, 1.567)) == "1.52x (1.48 to 1.57)"
    assert figures.factor_with_bounds(Interval(2.01, 1.45, 2.6)) == "2.0x (1.4 to 2.6)"
    assert figures.factor_with_bounds(Interval(1.5, 0.3, 6.5)) == "1.5x (0.3 to 6.5)"
    assert figures.factor_with_bounds(Interval(0.651, num_values=2)) == "0.65x (2 repeats)"
    assert figures.factor_with_bounds(Interval(1.3)) == "1.30x (1 repeat)"


def test_counts_and_shares() -> None:
    assert figures.counted(1, "prompt") == "1 prompt"
    assert figures.counted(23_676, "answer") == "23,676 answers"
    assert [figures.share(x) for x in (0.97, 0.004, 0.0, None)] == ["97%", "0.4%", "0%", "-"]
    assert figures.joined(["a", "b", "c"]) == "a, b and c"


@given(st.floats(1e-3, 1e7), st.floats(1e-6, 1.0))
def test_what_is_shown_is_within_the_spread_of_the_figure(value: float, part: float) -> None:
    spread = value * part
    shown = float(figures.quantity(value, spread).replace(",", ""))
    assert abs(shown - value) <= max(spread, value * 0.0005) * (1 + 1e-9)
    measured = Interval(value, value - spread, value + spread, 3)
    half = figures.with_spread(measured).partition("± ")[2]
    if half:
        assert float(half.replace(",", "")) >= spread * (1 - 1e-9), "a spread is not rounded down"
    assert math.isfinite(shown)

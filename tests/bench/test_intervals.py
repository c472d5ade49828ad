"""Percentiles and confidence intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.results.intervals import T_QUANTILES, percentile, t_interval, t_quantile

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(NUMBERS, st.floats(0.0, 1.0))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_interval_of_three_repeats_is_students() -> None:
    interval = t_interval([10.0, 12.0, 14.0])  # deviation 2, t(2) = 4.3027, root 3
    assert interval.mean == 12.0
    assert interval.high == pytest.approx(12.0 + 4.302653 * 2.0 / 3**0.5)
    assert interval.low == pytest.approx(12.0 - 4.302653 * 2.0 / 3**0.5)


def test_one_repeat_has_no_bounds() -> None:
    interval = t_interval([10.0])
    assert (interval.low, interval.high, interval.half_width) == (None, None, None)


def test_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    samples = generator.normal(5.0, 2.0, (4000, 4))
    inside = [i.low <= 5.0 <= i.high for i in map(t_interval, samples.tolist())]  # type: ignore[operator]
    assert 0.94 < np.mean(inside) < 0.96


def test_quantile_goes_on_smoothly_beyond_the_table() -> None:
    last = len(T_QUANTILES)
    assert t_quantile(31) == pytest.approx(2.039513, abs=1e-4)
    assert t_quantile(100) == pytest.approx(1.983972, abs=1e-5)
    assert all(t_quantile(n) > t_quantile(n + 1) for n in range(1, last + 20))

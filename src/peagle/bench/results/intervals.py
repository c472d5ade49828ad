"""Medians, percentiles and confidence intervals of a few numbers. Imports no torch.

The median, because one repeat beside which the machine did something else says nothing about a
setting: it widens the interval, but leaves the figure alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, stdev

LEVEL = 0.95
FEWEST_DEGREES = 2  # with one, t is 12.7: an interval that says nothing
# How much more a median of 1, 2, ... values of a normal distribution scatters than their mean.
MEDIAN_OVER_MEAN = (1.0, 1.0, 1.160, 1.092, 1.198, 1.135, 1.214)
OF_MANY = math.sqrt(math.pi / 2)
# 0.975 quantiles of Student's t for 1, 2, ... degrees of freedom.
T_QUANTILES = (
    *(12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157),
    *(2.228139, 2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922),
    *(2.093024, 2.085963, 2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831),
    *(2.048407, 2.045230, 2.042272),
)
NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True)
class Interval:
    """A figure from repeats, and where it lies with 95 % confidence; no bounds from too few."""

    value: float  # the median of the repeats, or a ratio of two medians
    low: float | None = None
    high: float | None = None
    num_values: int = 1
    least: float | None = None  # of the repeats; None for a ratio
    most: float | None = None

    @property
    def half_width(self) -> float | None:
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2


def median_interval(values: Sequence[float]) -> Interval:
    """The median of independent repeats; its interval by Student's t, from three of them on."""
    assert values
    middle, count, ends = median(values), len(values), (min(values), max(values))
    if count - 1 < FEWEST_DEGREES:
        return Interval(middle, None, None, count, *ends)
    half = t_quantile(count - 1) * median_over_mean(count) * stdev(values) / math.sqrt(count)
    return Interval(middle, middle - half, middle + half, count, *ends)


def median_over_mean(count: int) -> float:
    return MEDIAN_OVER_MEAN[count - 1] if count <= len(MEDIAN_OVER_MEAN) else OF_MANY


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t; beyond the table by its expansion around the normal's."""
    if degrees <= len(T_QUANTILES):
        return T_QUANTILES[degrees - 1]
    z = NORMAL_QUANTILE
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    return z + first + second


def percentile(ordered: Sequence[float], share: float) -> float:
    """A percentile of sorted values, linear between neighbours, as numpy's default is."""
    assert ordered
    rank = share * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)

"""Values between measured ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping


def between(line: Mapping[int, float], at: int) -> float:
    """The value at `at`, on the straight line between its neighbours; inside the range alone."""
    if at in line:
        return line[at]
    points = sorted(line)
    above = bisect_left(points, at)
    assert 0 < above < len(points), f"{at} lies outside {points[0]} to {points[-1]}"
    left, right = points[above - 1], points[above]
    share = (at - left) / (right - left)
    return line[left] + share * (line[right] - line[left])

"""How figures are written, on the terminal, in reports and in the docs. Imports no torch.

Thousands are separated, three digits are shown, and fewer or more where the scatter of the repeats
ends before or behind them: a digit that another run would not repeat is not printed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from peagle.bench.results.intervals import Interval

NOTHING = "-"
DIGITS, MOST_DIGITS = 3, 4
TWO_DIGITS_UP_TO = 2  # a spread that begins with 1 or 2 keeps a second digit
TOO_WIDE = 0.5  # an interval of half the figure to either side: the repeats themselves say more


def quantity(value: float, spread: float | None = None) -> str:
    """`1,740`, `38.8`, `2.31`, `0.058`. `spread`: how far off it may be."""
    return at_place(value, _place(value, spread))


def with_spread(measured: Interval) -> str:
    """`38.8 ± 2.1`; of too few repeats, or of wild ones, their range: `38.8 (36.0 to 41.6)`."""
    half = measured.half_width
    if half is not None and half <= TOO_WIDE * measured.value:
        place = _place(measured.value, half)
        return f"{at_place(measured.value, place)} ± {at_place(_rounded_up(half, place), place)}"
    if measured.num_values == 1 or measured.least is None or measured.most is None:
        return quantity(measured.value)
    # Two repeats may agree by chance, so that no more digits are shown than of one.
    half = (measured.most - measured.least) / 2
    place = max(_place(measured.value, half), _place(measured.value, None))
    ends = at_place(measured.least, place), at_place(measured.most, place)
    return f"{at_place(measured.value, place)} ({ends[0]} to {ends[1]})"


def figure(measured: Interval) -> str:
    """`38.8`, with the digits that `with_spread` shows."""
    return with_spread(measured).partition(" ")[0]


def factor(ratio: Interval) -> str:
    """`1.52x`."""
    return f"{at_place(ratio.value, _factor_place(ratio))}x"


def bounds(ratio: Interval) -> str:
    """`1.48 to 1.56`; of too few repeats, their number: `2 repeats`."""
    if ratio.low is None or ratio.high is None:
        return counted(ratio.num_values, "repeat")
    place = _factor_place(ratio)
    return f"{at_place(ratio.low, place)} to {at_place(ratio.high, place)}"


def factor_with_bounds(ratio: Interval) -> str:
    """`1.52x (1.48 to 1.56)`."""
    return f"{factor(ratio)} ({bounds(ratio)})"


def times(ratio: float) -> str:
    """`1.52x`, where nothing is known of its scatter."""
    return f"{ratio:.2f}x"


def length(tokens: float | None) -> str:
    """An acceptance length."""
    return NOTHING if tokens is None else f"{tokens:.2f}"


def share(value: float | None) -> str:
    """`97%`, `0.4%`."""
    if value is None:
        return NOTHING
    return f"{value:.1%}" if 0 < abs(value) < 0.01 else f"{value:.0%}"


def count(number: int) -> str:
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """`1 repeat`, `2 repeats`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else list(words))


def at_place(value: float, place: int) -> str:
    """Rounded to a power of ten: 1234.5 at 1 is `1,230`, at -1 `1,234.5`."""
    return f"{round(value, -place):,.{max(0, -place)}f}"


def _place(value: float, spread: float | None) -> int:
    """The power of ten of the last digit to show."""
    if value == 0 or not math.isfinite(value):
        return 0
    first = math.floor(math.log10(abs(value)))
    if spread is None:
        return first - DIGITS + 1
    finest = first - MOST_DIGITS + 1
    if spread <= 0 or not math.isfinite(spread):
        return finest
    place = math.floor(math.log10(spread))
    if spread < (TWO_DIGITS_UP_TO + 1) * 10**place:
        place -= 1
    return min(max(place, finest), first)


def _factor_place(ratio: Interval) -> int:
    """One or two digits behind the point."""
    half = ratio.half_width
    return -2 if half is None else min(-1, max(-2, _place(ratio.value, half)))


def _rounded_up(spread: float, place: int) -> float:
    """Never below what it is: a spread is not rounded to nothing."""
    unit = 10.0**place
    return math.ceil(spread / unit - 1e-9) * unit if spread > 0 else unit

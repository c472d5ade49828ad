"""How long a grid will still take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from peagle.bench.grid import GridCell, Turn


class TimeLeft:
    """A cell takes as long as the last time; one that was not run yet, the mean of the others."""

    def __init__(self, todo: Sequence[Turn]) -> None:
        self.todo = list(todo)
        self.seconds: dict[GridCell, float] = {}

    def finish(self, turn: Turn, seconds: float) -> None:
        self.todo.remove(turn)
        self.seconds[turn.cell] = seconds

    def estimate(self) -> float | None:
        """Seconds; None before the first run is done."""
        if not self.seconds:
            return None
        usual = fmean(self.seconds.values())
        return sum(self.seconds.get(turn.cell, usual) for turn in self.todo)


def in_words(seconds: float) -> str:
    """`48 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"

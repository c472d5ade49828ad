"""Progress of a grid: what is measured, the time left, and where no bar is shown a line per run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean

from peagle.bench.results.document import CellRun
from peagle.bench.results.figures import quantity
from peagle.bench.run.grid import GridCell, PlannedRun
from peagle.cli import render
from peagle.cli.progress import duration_in_words
from peagle.progress import Work, track


class TerminalProgress:
    def __init__(self) -> None:
        self._left = TimeLeft([])
        self._work = Work("measuring", 0, "runs")
        self._open = ExitStack()

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, todo: Sequence[PlannedRun], num_done: int) -> None:
        self._left = TimeLeft(todo)
        total = num_done + len(todo)
        if num_done:
            self.note(f"{num_done} of {total} runs are there already")
        self._work = self._open.enter_context(track("measuring", total, "runs", done=num_done))

    def start(self, planned: PlannedRun) -> None:
        self._work.reach(self._work.done, _name(planned))

    def finish(self, planned: PlannedRun, run: CellRun, seconds: float) -> None:
        self._left.finish(planned, seconds)
        self._work.seconds_left = self._left.estimate()
        self._work.advance()
        if not sys.stderr.isatty():
            place = f"[{self._work.done:.0f}/{self._work.total:.0f}]"
            speed = quantity(run.otps)
            self.note(f"{place} {_name(planned)}: {speed} tokens/s{self._remaining()}")

    def note(self, text: str) -> None:
        render.note(text)

    def _remaining(self) -> str:
        seconds = self._left.estimate()
        return "" if seconds is None else f", {duration_in_words(seconds)} left"


def _name(planned: PlannedRun) -> str:
    cell = planned.cell.empty()
    depth = f" K={cell.num_speculative_tokens}" if cell.num_speculative_tokens else ""
    return f"{cell.label}{depth}, load {cell.load}, {cell.workload}, repeat {planned.repeat + 1}"


class TimeLeft:
    """A cell takes as long as the last time; one that was not run yet, the mean of the others."""

    def __init__(self, todo: Sequence[PlannedRun]) -> None:
        self.todo = list(todo)
        self.seconds: dict[GridCell, float] = {}

    def finish(self, planned: PlannedRun, seconds: float) -> None:
        self.todo.remove(planned)
        self.seconds[planned.cell] = seconds

    def estimate(self) -> float | None:
        """Seconds; None before the first run is done."""
        if not self.seconds:
            return None
        usual = fmean(self.seconds.values())
        return sum(self.seconds.get(planned.cell, usual) for planned in self.todo)

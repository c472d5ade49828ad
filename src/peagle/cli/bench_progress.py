"""Progress of a grid on stderr: a bar with the time left on a terminal, else a line per run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from peagle.bench.results.document import CellRun
from peagle.bench.results.figures import quantity
from peagle.bench.run.grid import GridCell, PlannedRun
from peagle.cli import render


class TerminalProgress:
    def __init__(self) -> None:
        self._left = TimeLeft([])
        self._done = self._total = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> TerminalProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, todo: Sequence[PlannedRun], num_done: int) -> None:
        self._left = TimeLeft(todo)
        self._done, self._total = num_done, num_done + len(todo)
        if num_done:
            self.note(f"{num_done} of {self._total} runs are there already")
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=num_done)

    def start(self, planned: PlannedRun) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{_name(planned)}{self._remaining()}")

    def finish(self, planned: PlannedRun, run: CellRun, seconds: float) -> None:
        self._done += 1
        self._left.finish(planned, seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        place = f"[{self._done}/{self._total}]"
        self.note(f"{place} {_name(planned)}: {quantity(run.otps)} tokens/s{self._remaining()}")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
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


def duration_in_words(seconds: float) -> str:
    """`48 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"

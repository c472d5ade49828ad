"""Progress of a grid on stderr: a bar with the time left on a terminal, else a line per run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from peagle.bench.cells import Run
from peagle.bench.grid import Turn
from peagle.bench.progress import TimeLeft, in_words
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, todo: Sequence[Turn], num_done: int) -> None:
        self._left = TimeLeft(todo)
        self._done, self._total = num_done, num_done + len(todo)
        if num_done:
            self.note(f"{num_done} of {self._total} runs are there already")
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total, completed=num_done)

    def start(self, turn: Turn) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=f"{_name(turn)}{self._remaining()}")

    def finish(self, turn: Turn, run: Run, seconds: float) -> None:
        self._done += 1
        self._left.finish(turn, seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            return
        place = f"[{self._done}/{self._total}]"
        self.note(f"{place} {_name(turn)}: {run.otps:.1f} tokens/s{self._remaining()}")

    def note(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            render.note(text)

    def _remaining(self) -> str:
        seconds = self._left.estimate()
        return "" if seconds is None else f", {in_words(seconds)} left"


def _name(turn: Turn) -> str:
    cell = turn.cell.empty()
    depth = f" K={cell.num_speculative_tokens}" if cell.num_speculative_tokens else ""
    return f"{cell.label}{depth}, load {cell.load}, {cell.workload}, repeat {turn.repeat + 1}"

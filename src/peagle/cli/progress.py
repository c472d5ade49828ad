"""Progress of long work on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from peagle.cli import render
from peagle.log import is_quiet
from peagle.progress import Display, Work, shown_by

FIRST_LINE_SECONDS = 2.0  # what takes less is not worth a line
LINE_SECONDS = 10.0  # between two lines about the same work


@contextmanager
def shown_progress() -> Iterator[None]:
    """Work inside is shown, unless the user asked for quiet or another process shows it."""
    silent = is_quiet() or os.environ.get("RANK", "0") != "0"
    display: Display | None = None
    if not silent:
        display = Bars() if sys.stderr.isatty() else Lines()
    with shown_by(display):
        yield


class Bars:
    """On a terminal: a bar for each piece of work, gone when it is done."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._tasks: dict[Work, Any] = {}

    def begin(self, work: Work) -> None:
        if self._progress is None:
            self._progress = _bars()
            self._progress.start()
        task = self._progress.add_task(work.label, total=work.total, completed=work.done, status="")
        self._tasks[work] = task
        self.update(work)

    def update(self, work: Work) -> None:
        done, status = min(work.done, work.total or work.done), status_of(work)
        self._progress.update(self._tasks[work], completed=done, total=work.total, status=status)

    def end(self, work: Work) -> None:
        self._progress.remove_task(self._tasks.pop(work))
        if not self._tasks:
            self._progress.stop()
            self._progress = None


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[status]}", markup=False),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,  # or data would go to stderr; remarks stand above the bar
    )


class Lines:
    """Elsewhere: a line each LINE_SECONDS, and one at the end of what had some. Work of unknown
    length is named when it begins."""

    def __init__(self) -> None:
        self._due: dict[Work, float] = {}  # when the next line may come
        self._shown: set[Work] = set()

    def begin(self, work: Work) -> None:
        self._due[work] = monotonic() + FIRST_LINE_SECONDS
        if work.total is None:
            render.note(work.label)

    def update(self, work: Work) -> None:
        if monotonic() >= self._due[work]:
            self._due[work] = monotonic() + LINE_SECONDS
            self._shown.add(work)
            self._say(work)

    def end(self, work: Work) -> None:
        del self._due[work]
        if work in self._shown:
            self._shown.remove(work)
            self._say(work)

    def _say(self, work: Work) -> None:
        render.note(f"{work.label}: {status_of(work)}")


def status_of(work: Work) -> str:
    """`40 of 200 prompts, 8.1/s, 20 s left, 512 tokens`, less what is not known."""
    parts = []
    if work.total is not None:
        unit = f" {work.unit}" if work.unit else ""
        parts.append(f"{_number(work.done)} of {_number(work.total)}{unit}")
        if work.rate is not None:
            parts.append(_rate(work.rate, work.unit))
        if work.time_left is not None and work.done < work.total:
            parts.append(f"{duration_in_words(work.time_left)} left")
    return ", ".join([*parts, *([work.note] if work.note else [])])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _rate(rate: float, unit: str) -> str:
    """Per second, or the other way round where that is less than one."""
    if unit == "MB":
        return f"{rate:.1f} MB/s"
    return f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"


def duration_in_words(seconds: float) -> str:
    """`48 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"

"""Long work says how far it is; whoever set a display shows it. Without one nothing is shown.

with track("converting", total=272, unit="tensors") as work:
    for tensor in tensors:
        ...
        work.advance()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol


class Display(Protocol):
    """Shows pieces of work, which may lie in each other."""

    def begin(self, work: Work) -> None: ...

    def update(self, work: Work) -> None: ...

    def end(self, work: Work) -> None: ...


@dataclass(eq=False)
class Work:
    """One piece of work. `total` None: how much it is cannot be told."""

    label: str
    total: float | None = None
    unit: str = ""  # what is counted, in the plural
    done: float = 0.0  # may begin above 0, where earlier work is gone on with
    note: str = ""  # what else is worth showing
    seconds_left: float | None = None  # where the worker knows better than `time_left`
    display: Display | None = None
    started: float = field(default_factory=monotonic)
    _first: float = field(init=False)

    def __post_init__(self) -> None:
        self._first = self.done

    def advance(self, by: float = 1.0, note: str = "") -> None:
        self.reach(self.done + by, note)

    def reach(self, done: float, note: str = "") -> None:
        self.done, self.note = done, note
        if self.display is not None:
            self.display.update(self)

    @property
    def rate(self) -> float | None:
        """Units per second since the start; None before anything is done."""
        seconds = monotonic() - self.started
        return (self.done - self._first) / seconds if self.done > self._first and seconds else None

    @property
    def time_left(self) -> float | None:
        """Seconds; None as long as nobody can know."""
        if self.seconds_left is not None or self.total is None:
            return self.seconds_left
        return None if self.rate is None else max(self.total - self.done, 0.0) / self.rate


_display: ContextVar[Display | None] = ContextVar("display", default=None)


@contextmanager
def shown_by(display: Display | None) -> Iterator[None]:
    """Work inside is shown by `display`."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


@contextmanager
def track(
    label: str, total: float | None = None, unit: str = "", *, done: float = 0.0
) -> Iterator[Work]:
    display = _display.get()
    work = Work(label, total, unit, done, display=display)
    if display is None:
        yield work
        return
    display.begin(work)
    try:
        yield work
    finally:
        display.end(work)

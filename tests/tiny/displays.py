"""A display that remembers what was shown to it."""

from __future__ import annotations

from peagle.progress import Work


class Remembering:
    def __init__(self) -> None:
        self.ended: list[Work] = []
        self.seen: list[tuple[str, float]] = []  # label and what was done, at each update
        self.open: list[Work] = []

    def begin(self, work: Work) -> None:
        self.open.append(work)

    def update(self, work: Work) -> None:
        assert work in self.open
        self.seen.append((work.label, work.done))

    def end(self, work: Work) -> None:
        self.open.remove(work)
        self.ended.append(work)

    def work(self, label: str) -> Work:
        """The one piece of work of this name; it has ended."""
        (found,) = [work for work in self.ended if work.label == label]
        return found

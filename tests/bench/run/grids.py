"""Grids on the tiny model, and a watcher that notes what ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.bench.results.document import CellRun, Results
from peagle.bench.run.bench import bench
from peagle.bench.run.grid import PlannedRun
from peagle.bench.run.plan import make_plan
from peagle.cli.engines import build_backend


class Watcher:
    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.done: list[PlannedRun] = []
        self.num_done_before = 0
        self.notes: list[str] = []

    def begin(self, todo: Sequence[PlannedRun], num_done: int) -> None:
        self.num_done_before = num_done

    def start(self, planned: PlannedRun) -> None:
        if len(self.done) == self.stop_after:
            raise KeyboardInterrupt

    def finish(self, planned: PlannedRun, run: CellRun, seconds: float) -> None:
        self.done.append(planned)

    def note(self, text: str) -> None:
        self.notes.append(text)


def run_grid(watcher: Watcher | None = None, build: Any = build_backend, **keys: Any) -> Results:
    watcher = watcher or Watcher()
    defaults = {
        "device": "cpu",
        "max_tokens": 8,
        "repeats": 2,
        "concurrency": "1,2",
        "warmup": 1,
        "answers_per_stream": 1,
    }
    if keys.get("backend", "embedded") != "embedded":
        del defaults["device"]
    return bench(make_plan(defaults | keys, "test"), build, watcher, watcher.note)

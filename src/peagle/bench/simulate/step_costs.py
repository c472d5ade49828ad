"""Seconds of a step with and without speculation, and a table of measured ones.

`roofline.py` computes them instead. The table is JSON: {"step_costs": [{"part": "plain" | "verify"
| "draft" | "other", "method": ..., "k": 5, "concurrency": 4, "context": 512, "seconds": 0.004},
...]}. `plain` is a whole step without speculation; the other three add up to a step with it.
`method` and `k` belong to those three, and of trees `nodes`. Between two measured points the line
is taken. The step times of a bench result make a table, too.

A verification costs what its rows cost, so the steps of chains tell of trees with as many drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

from peagle.bench.results.document import Cell, Results, decode
from peagle.bench.results.settings import NONE, usable_runs
from peagle.errors import ConfigError, DataError

PLAIN, PARTS = "plain", ("verify", "draft", "other")


class StepCosts(Protocol):
    """Seconds. `concurrency` requests are decoded at once, each with `context` tokens behind it."""

    def plain(self, concurrency: int, context: int) -> float:
        """A whole step without speculation."""
        ...

    def speculative(
        self, method: str, k: int, concurrency: int, context: int, nodes: int | None = None
    ) -> float:
        """A whole step that drafts k tokens and verifies them; or a tree of `nodes`, k deep."""
        ...


@dataclass(frozen=True)
class MeasuredStep:
    part: str
    concurrency: int
    seconds: float
    context: int = 0
    method: str | None = None
    k: int = 0
    nodes: int | None = None  # of trees

    @property
    def num_drafts(self) -> int:
        return self.k if self.nodes is None else self.nodes


@dataclass(frozen=True)
class MeasuredCosts:
    steps: tuple[MeasuredStep, ...]

    def plain(self, concurrency: int, context: int) -> float:
        return _read([s for s in self.steps if s.part == PLAIN], PLAIN, 0, concurrency, context)

    def speculative(
        self, method: str, k: int, concurrency: int, context: int, nodes: int | None = None
    ) -> float:
        total, where = 0.0, f"K = {k}" if nodes is None else f"K = {k}, N = {nodes}"
        for part in PARTS:
            steps = [s for s in self.steps if (s.part, s.method) == (part, method)]
            if steps or part == "verify":
                line, size = _line(steps, part, k, nodes)
                total += _read(line, f"{part} of {method}, {where}", size, concurrency, context)
        return total

    def methods(self) -> list[str]:
        return sorted({s.method for s in self.steps if s.method})


def measured_costs(document: object, where: str) -> MeasuredCosts:
    rows = document.get("step_costs") if isinstance(document, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise DataError(
            f"{where} does not have a list step_costs", hint="see peagle simulate --help"
        )
    steps = [decode(MeasuredStep, row, f"{where}: step_costs[{n}]") for n, row in enumerate(rows)]
    for n, step in enumerate(steps):
        if step.part not in (PLAIN, *PARTS) or not step.seconds >= 0 or step.concurrency < 1:
            raise DataError(f"{where}: step_costs[{n}] is out of range: {rows[n]}")
    return MeasuredCosts(tuple(steps))


def _line(
    steps: Sequence[MeasuredStep], part: str, k: int, nodes: int | None
) -> tuple[list[MeasuredStep], int]:
    """The steps that tell of this one, by their number of drafts, and where it lies among them."""
    chains = [s for s in steps if s.nodes is None]
    if nodes is None:
        return chains, k
    trees = [s for s in steps if s.nodes is not None]
    if part == "verify":
        as_trees = {s.num_drafts for s in trees}
        return [*trees, *(s for s in chains if s.num_drafts not in as_trees)], nodes
    # The drafter's work is that of its depth, whatever is made of it.
    own = [s for s in trees if s.k == k]
    if not own:
        return chains, k
    sizes = {s.num_drafts for s in own}
    return own, min(max(nodes, min(sizes)), max(sizes))


def _read(
    steps: Sequence[MeasuredStep], what: str, size: int, concurrency: int, context: int
) -> float:
    """Along the context, then the concurrency, then the number of drafts. Past the last context its
    value is kept, past the others it is an error."""
    by_size: dict[int, float] = {}
    for measured in {s.num_drafts for s in steps}:
        by_load: dict[int, float] = {}
        row = [s for s in steps if s.num_drafts == measured]
        for load in {s.concurrency for s in row}:
            line: dict[int, list[float]] = {}
            for step in row:  # trees of as many nodes and other depths among them
                if step.concurrency == load:
                    line.setdefault(step.context, []).append(step.seconds)
            means = {at: fmean(seconds) for at, seconds in line.items()}
            by_load[load] = between(means, min(max(context, min(means)), max(means)))
        if min(by_load) <= concurrency <= max(by_load):
            by_size[measured] = between(by_load, concurrency)
    if not by_size or not min(by_size) <= size <= max(by_size):
        raise ConfigError(
            f"no measured step times around {what}, concurrency {concurrency}",
            hint="ask for points within the measured range",
        )
    return between(by_size, size)


def measured_table(results: Results) -> MeasuredCosts:
    """Step times of all cells with a concurrency; workloads are averaged."""
    groups: dict[tuple[object, ...], list[MeasuredStep]] = {}
    for cell in results.fixed:
        for step in steps_of(cell) if cell.concurrency else []:
            key = (step.part, step.method, step.k, step.nodes, step.concurrency)
            groups.setdefault(key, []).append(step)
    means = [replace(s[0], seconds=fmean(x.seconds for x in s)) for s in groups.values()]
    if not means:
        raise DataError("no cell has step times", hint="run peagle bench on the embedded engine")
    return MeasuredCosts(tuple(means))


def steps_of(cell: Cell) -> list[MeasuredStep]:
    """The parts of one step of all requests; the engine's clock counts steps per request."""
    runs = [run for run in usable_runs(cell) if run.stats.get("num_steps")]
    seconds = {part: sum(run.stats.get(f"{part}_time", 0.0) for run in runs) for part in PARTS}
    if not runs or not sum(seconds.values()) or cell.concurrency is None:
        return []
    per_step = cell.concurrency / sum(run.stats["num_steps"] for run in runs)
    if cell.method == NONE:
        return [MeasuredStep(PLAIN, cell.concurrency, sum(seconds.values()) * per_step)]
    method, k, nodes = cell.method, cell.num_speculative_tokens, cell.num_draft_nodes
    return [
        MeasuredStep(part, cell.concurrency, total * per_step, method=method, k=k, nodes=nodes)
        for part, total in seconds.items()
    ]


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

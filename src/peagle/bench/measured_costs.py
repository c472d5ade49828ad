"""Step costs from a table of measured times; between two measured points the line is taken.

The table is JSON: {"step_costs": [{"part": "plain" | "verify" | "draft" | "other", "method": ...,
"k": 5, "concurrency": 4, "context": 512, "seconds": 0.004}, ...]}. `plain` is a whole step without
speculation; the other three add up to a step with it. `method` and `k` belong to those three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peagle.bench.codec import decode
from peagle.bench.interpolation import between
from peagle.errors import ConfigError, DataError

PLAIN, PARTS = "plain", ("verify", "draft", "other")


@dataclass(frozen=True)
class MeasuredStep:
    part: str
    concurrency: int
    seconds: float
    context: int = 0
    method: str | None = None
    k: int = 0


@dataclass(frozen=True)
class MeasuredCosts:
    steps: tuple[MeasuredStep, ...]

    def plain(self, concurrency: int, context: int) -> float:
        return _read([s for s in self.steps if s.part == PLAIN], PLAIN, 0, concurrency, context)

    def speculative(self, method: str, k: int, concurrency: int, context: int) -> float:
        total = 0.0
        for part in PARTS:
            steps = [s for s in self.steps if (s.part, s.method) == (part, method)]
            if steps or part == "verify":
                total += _read(steps, f"{part} of {method}", k, concurrency, context)
        return total

    def methods(self) -> list[str]:
        return sorted({s.method for s in self.steps if s.method})


def measured_costs(document: object, where: str) -> MeasuredCosts:
    rows = document.get("step_costs") if isinstance(document, Mapping) else None
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{where} has no list step_costs", hint="see peagle simulate --help")
    steps = [decode(MeasuredStep, row, f"{where}: step_costs[{n}]") for n, row in enumerate(rows)]
    for n, step in enumerate(steps):
        if step.part not in (PLAIN, *PARTS) or not step.seconds >= 0 or step.concurrency < 1:
            raise DataError(f"{where}: step_costs[{n}] makes no sense: {rows[n]}")
    return MeasuredCosts(tuple(steps))


def _read(
    steps: Sequence[MeasuredStep], what: str, k: int, concurrency: int, context: int
) -> float:
    """Along the context, then the concurrency, then k. Past the last context its value is kept,
    past the others there is no guess."""
    by_k: dict[int, float] = {}
    for k_measured in {s.k for s in steps}:
        by_load: dict[int, float] = {}
        row = [s for s in steps if s.k == k_measured]
        for load in {s.concurrency for s in row}:
            line = {s.context: s.seconds for s in row if s.concurrency == load}
            by_load[load] = between(line, min(max(context, min(line)), max(line)))
        if min(by_load) <= concurrency <= max(by_load):
            by_k[k_measured] = between(by_load, concurrency)
    if not by_k or not min(by_k) <= k <= max(by_k):
        raise ConfigError(
            f"no measured step times around K = {k}, concurrency {concurrency} for {what}",
            hint="ask for points inside the measured ones",
        )
    return between(by_k, k)

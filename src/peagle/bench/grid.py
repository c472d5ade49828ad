"""The cells of a grid and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from peagle.bench.cells import Cell
from peagle.bench.driver import Load
from peagle.bench.plan import NGRAM, NONE, BenchPlan
from peagle.config import DEFAULT_SPECULATIVE_TOKENS
from peagle.errors import ConfigError


class Drafting(NamedTuple):
    """A method with its head and depth; the plain target is ("none", None, 0)."""

    method: str
    head: str | None = None
    num_speculative_tokens: int = 0


class HeadLimits(NamedTuple):
    """What a grid needs to know of a head before it is loaded."""

    reference: str
    method: str
    advised: int
    deepest: int


class GridCell(NamedTuple):
    drafting: Drafting
    load: Load
    workload: str

    def empty(self) -> Cell:
        return Cell(
            method=self.drafting.method,
            head=self.drafting.head,
            num_speculative_tokens=self.drafting.num_speculative_tokens,
            workload=self.workload,
            concurrency=self.load.concurrency,
            request_rate=self.load.request_rate,
        )


class Turn(NamedTuple):
    """One run of one cell."""

    cell: GridCell
    repeat: int


def draftings(plan: BenchPlan, heads: Sequence[HeadLimits]) -> tuple[list[Drafting], list[str]]:
    """Every method at every K, method none first; and notes on depths that a head cannot reach."""
    if plan.is_endpoint:
        method = plan.spec_method[0] if plan.spec_method else "endpoint"
        return [Drafting(method, None, plan.spec_tokens[0] if plan.spec_tokens else 0)], []
    found, notes = [Drafting(NONE)], []
    if NGRAM in plan.spec_method:
        depths = plan.spec_tokens or [DEFAULT_SPECULATIVE_TOKENS]
        found += [Drafting(NGRAM, None, k) for k in depths]
    wanted = set(plan.spec_method) - {NONE, NGRAM}
    for head in heads:
        if wanted and head.method not in wanted:
            raise ConfigError(
                f"{head.reference} is a head for {head.method}, not {' or '.join(sorted(wanted))}",
                hint=f"drop it, or add {head.method} to --spec-method",
            )
        depths = plan.spec_tokens or [head.advised]
        within = [k for k in depths if k <= head.deepest]
        if not within:
            raise ConfigError(
                f"{head.reference} drafts at most {head.deepest} tokens", hint="lower --spec-tokens"
            )
        if len(within) < len(depths):
            notes.append(
                f"{head.reference} drafts at most {head.deepest} tokens; deeper K is left out"
            )
        found += [Drafting(head.method, head.reference, k) for k in within]
    missing = wanted - {head.method for head in heads}
    if missing:
        raise ConfigError(
            f"method {min(missing)} needs a head", hint="give it with --spec-model HEAD"
        )
    return list(dict.fromkeys(found)), notes


def make_cells(
    plan: BenchPlan, methods: Sequence[Drafting], workloads: Sequence[str]
) -> list[GridCell]:
    """Grouped by drafter, so that few engines need to be alive at once."""
    loads = [Load(concurrency=c) for c in sorted(set(plan.concurrencies))]
    loads += [Load(request_rate=rate) for rate in sorted(set(plan.request_rate))]
    return [
        GridCell(m, load, workload) for m in methods for load in loads for workload in workloads
    ]


def turns(cells: Sequence[GridCell], repeats: int, *, interleave: bool) -> Iterator[Turn]:
    """Interleaved: all cells once, then all again. Every other round goes backwards, so that a
    machine that slows down steadily hits early and late cells alike."""
    if not interleave:
        yield from (Turn(cell, repeat) for cell in cells for repeat in range(repeats))
        return
    for repeat in range(repeats):
        ordered = cells if repeat % 2 == 0 else list(reversed(cells))
        yield from (Turn(cell, repeat) for cell in ordered)

"""Which method and K to run, from bench results: per load, per workload, and over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench.advice import ALL, Advice, Choice, decide
from peagle.bench.cells import Cell
from peagle.bench.gains import gains, mean_tokens, mixed_speeds
from peagle.bench.intervals import t_interval
from peagle.bench.results import Results
from peagle.bench.settings import (
    NONE,
    Names,
    Place,
    Setting,
    by_place,
    load_key,
    place_of,
    series_names,
    short_name,
    usable_runs,
)
from peagle.errors import DataError

Cells = Mapping[Setting, Cell]


@dataclass(frozen=True)
class Tuning:
    by_place: tuple[Advice, ...]  # each workload under each load
    by_load: tuple[Advice, ...]  # all workloads under each load, weighted by tokens
    overall: Advice  # one setting for everything
    notes: tuple[str, ...]


def tune(results: Results) -> Tuning:
    """Advice for every place, every load over all workloads, and overall."""
    table = {p: c for p, c in by_place(results.cells).items() if _plain(c) and not p.is_open_loop}
    if not any(usable_runs(cell) for cell in results.cells):
        raise DataError("nothing was measured yet", hint="run peagle bench again to go on")
    if not table:
        raise DataError(
            "no cell of method none at a concurrency: there is nothing to gain over",
            hint="measure the same workloads without a drafter, too, and by --concurrency",
        )
    loads = sorted({place.load for place in table}, key=load_key)
    names = series_names(results.cells)
    overall = _advise(table, ALL, ALL, names)
    return Tuning(
        by_place=tuple(_advise({p: c}, p.workload, p.load, names) for p, c in table.items()),
        by_load=tuple(_advise(_at(table, load), ALL, load, names) for load in loads),
        overall=overall,
        notes=_notes(results, table, overall),
    )


def _at(table: Mapping[Place, Cells], load: str) -> dict[Place, Cells]:
    return {place: cells for place, cells in table.items() if place.load == load}


def _plain(cells: Cells) -> Cell | None:
    return next((cell for setting, cell in cells.items() if setting.method == NONE), None)


def _advise(table: Mapping[Place, Cells], workload: str, load: str, names: Names) -> Advice:
    """Settings that were measured everywhere in `table` compete."""
    everywhere = set.intersection(*(set(cells) for cells in table.values()))
    settings = sorted(everywhere, key=lambda s: s.sort_key)
    weights = [mean_tokens(_found(_plain(cells))) for cells in table.values()]
    speeds = {s: mixed_speeds([cells[s] for cells in table.values()], weights) for s in settings}
    gained = gains(speeds)
    lengths = {s: _acceptance([cells[s] for cells in table.values()], weights) for s in settings}
    choices = sorted(
        (
            Choice(s, short_name(s, names), t_interval([*v.values()]), gained[s], lengths[s])
            for s, v in speeds.items()
        ),
        key=lambda c: -c.gain.mean,
    )
    return decide(workload, load, choices, speeds)


def _acceptance(cells: Sequence[Cell], weights: Sequence[float]) -> float | None:
    """Tokens per step over all cells: tokens add up, and so do steps."""
    summaries = [cell.summary() for cell in cells]
    lengths = [s.acceptance_length if s else None for s in summaries]
    steps = [w / n for w, n in zip(weights, lengths, strict=True) if n]
    return sum(weights) / sum(steps) if len(steps) == len(cells) else None


def _found(cell: Cell | None) -> Cell:
    assert cell is not None
    return cell


def _notes(results: Results, table: Mapping[Place, Any], overall: Advice) -> tuple[str, ...]:
    notes = []
    closed = {place_of(c) for c in results.cells if not place_of(c).is_open_loop}
    missing = sorted(f"{place.workload} at {place.load}" for place in closed - set(table))
    if missing:
        notes.append(f"left out, method none was not measured there: {', '.join(missing)}")
    if any(place_of(cell).is_open_loop for cell in results.cells):
        notes.append("request rates are left out: arrivals set their speed, see their latencies")
    if results.partial or any(run.partial for cell in results.cells for run in cell.repeats):
        notes.append("the results are partial: measure the rest before you rely on this")
    if any(c.otps.low is None for c in overall.choices):
        notes.append("one repeat only: no intervals, nothing says which gains are noise")
    return tuple(notes)

"""Files of single runs -> the result as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median

from peagle.bench.cells import Cell
from peagle.bench.grid import GridCell, Turn
from peagle.bench.results import Agreement, Lossless, Manifest, Results, Sample
from peagle.bench.settings import NONE
from peagle.bench.store import RunFile, run_name

MOST_DIFFERENCES = 200  # that a result names


def assemble(
    manifest: Manifest,
    cells: Sequence[GridCell],
    planned: Iterable[Turn],
    files: Sequence[RunFile],
) -> Results:
    """The grid's cells in their order, then those that an earlier grid left in the folder."""
    by_cell: dict[str, list[RunFile]] = {}
    for file in sorted(files, key=lambda file: file.repeat):
        by_cell.setdefault(_key(file.cell), []).append(file)
    found = {_key(cell.empty()): cell.empty() for cell in cells}
    found |= {key: group[0].cell for key, group in by_cell.items() if key not in found}
    filled = [
        replace(cell, repeats=[file.run for file in by_cell.get(key, [])])
        for key, cell in found.items()
    ]
    whole = {run_name(f.cell, f.repeat) for f in files if not f.run.partial}
    return Results(
        manifest,
        [cell for cell in filled if cell.repeats],
        _lossless(files),
        _samples(filled, files),
        partial=any(run_name(t.cell.empty(), t.repeat) not in whole for t in planned),
    )


def _lossless(files: Sequence[RunFile]) -> Lossless | None:
    compared = sum(file.compared for file in files)
    if not compared:
        return None
    rounds = zip_longest(*(file.differences for file in files))  # some of each run
    differences = [d for group in rounds for d in group if d is not None]
    return Lossless(
        compared,
        sum(file.different for file in files),
        sum(file.not_comparable for file in files),
        differences[:MOST_DIFFERENCES],
        plain=_agreement([file for file in files if file.cell.method == NONE]),
        speculative=_agreement([file for file in files if file.cell.method != NONE]),
    )


def _agreement(files: Sequence[RunFile]) -> Agreement | None:
    """None where nothing was compared."""
    compared = sum(file.compared for file in files)
    if not compared:
        return None
    gaps = [abs(d.gap) for file in files for d in file.differences if d.gap is not None]
    return Agreement(
        compared,
        sum(file.different for file in files),
        len(gaps),
        median(gaps) if gaps else None,
        max(gaps, default=None),
    )


def _samples(cells: Sequence[Cell], files: Sequence[RunFile]) -> list[Sample]:
    """Of each method on each workload, those of the K that was fastest."""
    speeds = {_key(c): s.otps.mean for c in cells if (s := c.summary()) is not None}
    best: dict[tuple[str, str, str | None], RunFile] = {}
    for file in (file for file in files if file.samples):
        name = (file.cell.workload, file.cell.method, file.cell.head)
        if name not in best or speeds[_key(file.cell)] > speeds[_key(best[name].cell)]:
            best[name] = file
    return [sample for file in best.values() for sample in file.samples]


def _key(cell: Cell) -> str:
    return run_name(cell, 0)

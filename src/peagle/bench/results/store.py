"""The folder of a grid: manifest.json, one file per run in runs/, and results.json made of them.

Every file is written atomically, so whatever ended a grid, the next one goes on with the runs
that are whole. A folder is one table, so its runs must have one origin: `joined` refuses others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from peagle.bench.results.document import (
    RESULTS,
    Agreement,
    AnswerDifference,
    Cell,
    CellRun,
    Lossless,
    Manifest,
    Results,
    Sample,
    TreeSample,
    decode,
    method_name,
)
from peagle.bench.results.settings import NONE, load_key
from peagle.errors import ConfigError, DataError
from peagle.files import held_folder, write_json, writing

MANIFEST, RUNS = "manifest.json", "runs"
MOST_DIFFERENCES = 200  # that a result names
# The parts of the provenance that must not change between the runs of one table.
SAME_HARDWARE = ("cpu", "cores", "gpus")
SAME_VERSIONS = ("peagle", "torch", "vllm")

AnswerKey = tuple[str, int]  # prompt's id and turn


@dataclass(frozen=True)
class KeptAnswer:
    prompt: str
    turn: int
    token_ids: list[int]


@dataclass(frozen=True)
class RunFile:
    """One run, and what the result as a whole needs of it. `answers`: what others are compared
    with, so of method none alone."""

    cell: Cell  # without repeats
    repeat: int
    run: CellRun
    compared: int = 0
    different: int = 0
    not_comparable: int = 0
    differences: list[AnswerDifference] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    answers: list[KeptAnswer] = field(default_factory=list)
    tree: TreeSample | None = None


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, RunFile | None] = {}  # by name, as far as they were looked at

    @contextlib.contextmanager
    def opened(self, *, overwrite: bool) -> Iterator[None]:
        """Makes the folder and holds it alone."""
        with held_folder(self.folder):
            with writing(self.folder):
                self._refuse_others()
                if overwrite:
                    self._clear()
                (self.folder / RUNS).mkdir(exist_ok=True)
            yield

    def agree(self, manifest: Manifest) -> Manifest:
        """The manifest that the folder has, extended; or the given one in a fresh folder."""
        path = self.folder / MANIFEST
        if not path.exists():
            write_json(path, asdict(manifest))
            return manifest
        before = decode(Manifest, _read(path), str(path))
        whole = joined(before, manifest, self.folder)
        write_json(path, asdict(whole))
        return whole

    def load(self, cell: Cell, repeat: int) -> RunFile | None:
        """None where the run was not made."""
        return self._load(run_name(cell, repeat))

    def reference(self, workload: str) -> dict[AnswerKey, list[int]]:
        """Method none's answers to a workload, each from the least load that asked for it."""
        kept = [f for f in self.load_all() if f.answers and f.cell.workload == workload]
        known: dict[AnswerKey, list[int]] = {}
        for file in sorted(kept, key=lambda file: load_key(file.cell.load)):
            for answer in file.answers:
                known.setdefault((answer.prompt, answer.turn), answer.token_ids)
        return known

    def load_all(self) -> list[RunFile]:
        """Every run of the folder, of earlier grids too."""
        names = sorted(path.name for path in (self.folder / RUNS).glob("*.json"))
        return [file for name in names if (file := self._load(name)) is not None]

    def save(self, file: RunFile) -> None:
        name = run_name(file.cell, file.repeat)
        write_json(self.folder / RUNS / name, asdict(file))
        self._files[name] = file

    def _load(self, name: str) -> RunFile | None:
        """A missing or damaged file is none: the run is made again."""
        if name not in self._files:
            self._files[name] = None
            path = self.folder / RUNS / name
            with contextlib.suppress(DataError, FileNotFoundError):
                self._files[name] = decode(RunFile, _read(path), str(path))
        return self._files[name]

    def _refuse_others(self) -> None:
        """A dataset has a manifest.json and a project may have runs/: neither is ours to touch."""
        manifest = self.folder / MANIFEST
        if manifest.exists():
            found = _read(manifest)
            is_ours = isinstance(found, dict) and found.keys() >= {"provenance", "workloads"}
        else:
            runs = self.folder / RUNS
            is_ours = not runs.is_dir() or not any(runs.iterdir())
        if not is_ours:
            raise ConfigError(
                f"{self.folder} holds something other than results of peagle bench",
                hint="give another --out",
            )

    def _clear(self) -> None:
        """Removes what a grid wrote, and nothing else."""
        shutil.rmtree(self.folder / RUNS, ignore_errors=True)
        for name in (MANIFEST, RESULTS):
            (self.folder / name).unlink(missing_ok=True)


def run_name(cell: Cell, repeat: int) -> str:
    """Says what it is, and is unique by its digest."""
    fields = asdict(replace(cell, repeats=[]))
    if cell.num_draft_nodes is None:
        del fields["num_draft_nodes"]
    if not cell.is_auto:
        del fields["is_auto"]
    content = json.dumps(fields, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    words = (
        method_name(cell.method, cell.num_draft_nodes, is_auto=cell.is_auto),
        cell.num_speculative_tokens,
        cell.load,
        Path(cell.workload).name,
    )
    name = re.sub(r"[^\w.-]+", "-", "-".join(map(str, words)))
    return f"{name}-{digest}-{repeat}.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="give another --out") from None


def joined(before: Manifest, now: Manifest, folder: Path) -> Manifest:
    """The manifest of a folder, extended by what a further grid adds; refused if they differ."""
    _refuse_other(before, now, folder)
    return replace(
        before,
        num_repeats=max(before.num_repeats, now.num_repeats),
        heads=_union(before.heads, now.heads),
        workloads=_union(before.workloads, now.workloads),
    )


def _refuse_other(before: Manifest, now: Manifest, folder: Path) -> None:
    """Numbers of two grids that differ in more than their cells make no table."""
    hint = "give another --out, or --overwrite to start anew"
    old, new = _identity(before), _identity(now)
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"{folder} was measured with {name} {old.get(name)!r}, not {new.get(name)!r}",
                hint=hint,
            )
    old, new = _contents(before), _contents(now)
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ConfigError(f"{name} has changed since {folder} was begun", hint=hint)


def _identity(manifest: Manifest) -> dict[str, Any]:
    """What every run of one table shares."""
    names = ("model", "backend", "dtype", "device", "seed", "max_tokens", "temperature")
    hardware = manifest.provenance.get("hardware", {})
    versions = manifest.provenance.get("versions", {})
    return {
        **{name: getattr(manifest, name) for name in names},
        **manifest.settings,
        **{name: hardware.get(name) for name in SAME_HARDWARE},
        **{f"{name} version": versions.get(name) for name in SAME_VERSIONS},
    }


def _contents(manifest: Manifest) -> dict[str, str | None]:
    heads = {f"head {head.reference}": head.sha256 for head in manifest.heads}
    return heads | {f"workload {w.name}": w.sha256 for w in manifest.workloads}


def _union(before: list[Any], now: list[Any]) -> list[Any]:
    return [*before, *(entry for entry in now if entry not in before)]


def assemble(
    manifest: Manifest,
    cells: Sequence[Cell],
    planned: Iterable[tuple[Cell, int]],
    files: Sequence[RunFile],
) -> Results:
    """The grid's cells in their order, then those that an earlier grid left in the folder.
    `planned`: each run that the grid wants, as its cell and the number of the repeat."""
    by_cell: dict[str, list[RunFile]] = {}
    for file in sorted(files, key=lambda file: file.repeat):
        by_cell.setdefault(_key(file.cell), []).append(file)
    found = {_key(cell): cell for cell in cells}
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
        partial=any(run_name(*run) not in whole for run in planned),
        trees=list({f.tree.method: f.tree for f in reversed(files) if f.tree is not None}.values()),
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
    """For each method and workload the samples of the K that was fastest."""
    speeds = {_key(c): s.otps.value for c in cells if (s := c.summary()) is not None}
    best: dict[tuple[str, str, str | None], RunFile] = {}
    for file in (file for file in files if file.samples):
        name = (file.cell.workload, file.cell.method, file.cell.head)
        if name not in best or speeds[_key(file.cell)] > speeds[_key(best[name].cell)]:
            best[name] = file
    return [sample for file in best.values() for sample in file.samples]


def _key(cell: Cell) -> str:
    return run_name(cell, 0)

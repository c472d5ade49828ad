"""The folder of a grid: manifest.json, one file per run in runs/, and results.json made of them.

Every file is written atomically, so whatever ended a grid, the next one goes on with the runs
that are whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.bench.agreement import joined
from peagle.bench.cells import Cell, Run
from peagle.bench.codec import decode
from peagle.bench.grid import Turn
from peagle.bench.lossless import AnswerKey
from peagle.bench.results import Difference, Manifest, Sample
from peagle.bench.results_file import RESULTS
from peagle.bench.settings import load_key
from peagle.errors import ConfigError, DataError
from peagle.files import write_json
from peagle.locking import hold_lock

MANIFEST, RUNS, LOCK = "manifest.json", "runs", ".lock"


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
    run: Run
    compared: int = 0
    different: int = 0
    not_comparable: int = 0
    differences: list[Difference] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    answers: list[KeptAnswer] = field(default_factory=list)


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, RunFile | None] = {}  # by name, as far as they were looked at

    @contextlib.contextmanager
    def opened(self, *, overwrite: bool) -> Iterator[None]:
        """Makes the folder and holds it alone."""
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = hold_lock(self.folder / LOCK, on_wait=self._refuse_company)
                stack.enter_context(lock)
                if overwrite:
                    self._clear()
                (self.folder / RUNS).mkdir(exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"cannot write to {self.folder}: {error.strerror}", hint="give another --out"
                ) from None
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

    def load(self, turn: Turn) -> RunFile | None:
        """None where the run was not made."""
        return self._load(run_name(turn.cell.empty(), turn.repeat))

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

    def _clear(self) -> None:
        """Removes what a grid wrote, and nothing else."""
        shutil.rmtree(self.folder / RUNS, ignore_errors=True)
        for name in (MANIFEST, RESULTS):
            (self.folder / name).unlink(missing_ok=True)

    def _refuse_company(self) -> None:
        raise ConfigError(f"another peagle bench writes to {self.folder}", hint="wait, or stop it")


def run_name(cell: Cell, repeat: int) -> str:
    """Says what it is, and is unique by its digest."""
    content = json.dumps(asdict(replace(cell, repeats=[])), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    words = (cell.method, cell.num_speculative_tokens, cell.load, Path(cell.workload).name)
    name = re.sub(r"[^\w.-]+", "-", "-".join(map(str, words)))
    return f"{name}-{digest}-{repeat}.json"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="--overwrite starts anew") from None

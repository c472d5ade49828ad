"""OUT/results.json, written and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peagle.bench.codec import decode
from peagle.bench.results import FORMAT_VERSION, Results
from peagle.errors import DataError
from peagle.files import write_json

RESULTS = "results.json"


def save_results(results: Results, folder: Path) -> Path:
    path = folder / RESULTS
    write_json(path, results.to_json())
    return path


def load_results(path: Path) -> Results:
    """Reads a results file, or the folder that holds one."""
    file = path / RESULTS if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"no results at {path}: {error.strerror}", hint="give an --out of peagle bench"
        ) from None
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from None
    return from_json(document, str(file))


def from_json(document: Any, where: str) -> Results:
    if not isinstance(document, dict) or "manifest" not in document:
        raise DataError(f"{where} is no result of peagle bench")
    if document.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{where} has version {document.get('version')}, this peagle reads {FORMAT_VERSION}",
            hint="measure again, or use the peagle that wrote it",
        )
    results = decode(Results, _without_summaries(document), where)
    for number, cell in enumerate(results.cells):
        if (cell.concurrency is None) == (cell.request_rate is None):
            raise DataError(f"{where}: cells[{number}] needs concurrency or request_rate, not both")
    return results


def _without_summaries(document: dict[str, Any]) -> dict[str, Any]:
    """They are made from the repeats, never read."""
    cells = document.get("cells")
    if not isinstance(cells, list):
        return document
    bare = [
        {key: value for key, value in cell.items() if key != "summary"}
        if isinstance(cell, dict)
        else cell
        for cell in cells
    ]
    return document | {"cells": bare}

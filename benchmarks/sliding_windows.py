"""Acceptance by length of the context, of heads whose layers see everything and of the same heads
with a sliding window.

    python recipes/long_prompts.py smollm2-135m prompts.jsonl.gz long.jsonl.gz
    peagle prepare --model smollm2-135m --prompts long.jsonl.gz --max-tokens 192 --out DATA
    python benchmarks/sliding_windows.py --data DATA --held-out-share 0.02 --out FILE

A head that was trained on short rows drafts worse behind contexts that are longer. A window as long
as its rows shows it no more than it has learned to read; what stands before it, the target's hidden
states still tell. Offline and greedy, as `peagle evaluate`: the machine's speed does not matter.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.checkpoints.heads.references import resolve_head
from peagle.config import EngineConfig
from peagle.data.dataset import Dataset
from peagle.data.packing import PackedRow
from peagle.evaluate.evaluator import Evaluator
from peagle.evaluate.offline import build_evaluator, load_pair
from peagle.evaluate.recall import evaluate_greedy
from peagle.files import write_json
from peagle.provenance import provenance
from peagle.teacher_forcing.draft_model import DraftModel
from peagle.teacher_forcing.features import Features, FeatureSource, Fetched


class KeptFeatures:
    """What the target computes of a row is the same for every window."""

    def __init__(self, source: FeatureSource) -> None:
        self.source = source
        self.kept: dict[tuple[int, ...], Features] = {}

    def fetch(self, row: PackedRow) -> Fetched:
        return self.source.fetch(row)

    def __call__(self, row: PackedRow, fetched: Fetched) -> Features:
        key = tuple(row.indices)
        if key not in self.kept:
            self.kept[key] = self.source(row, fetched)
        return self.kept[key]


def with_window(head: str, window: int | None, folder: Path) -> Path:
    """The head's folder again, with another window."""
    folder.mkdir()
    for file in resolve_head(head).iterdir():
        (folder / file.name).symlink_to(file.absolute())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    return folder


def lengths_by_context(evaluator: Evaluator, model: DraftModel) -> dict[str, Any]:
    return evaluate_greedy(evaluator, model).by_context.as_dict()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is known after each window."""
    dataset, config = Dataset(args.data), EngineConfig(dtype=args.dtype)
    share = args.held_out_share
    rows = dataset.split(share)[1] if share else list(range(len(dataset)))
    workload = {
        **{key: value for key, value in vars(args).items() if key not in ("out", "data")},
        "made_by": dataset.manifest["made_by"],
        "num_rows": len(rows),
        "num_tokens": int(dataset.lengths[rows].sum()),
        "longest_row": int(dataset.lengths[rows].max()),
    }
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, head in enumerate(args.heads):
            kept: KeptFeatures | None = None
            for window in (size or None for size in args.windows):
                made = with_window(head, window, Path(folder) / f"{number}-{window}")
                pair = load_pair(str(made), args.model, config)
                evaluator = build_evaluator(pair, dataset, rows, args.spec_tokens)
                kept = kept or KeptFeatures(evaluator.source)
                evaluator.source = kept
                found = lengths_by_context(evaluator, DraftModel(pair.network))
                cells.append({"head": head, "sliding_window": window, "by_context": found})
                done = {"cells": cells, "workload": workload}
                yield done | {"provenance": provenance(probe_torch=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--heads", nargs="+", default=["smollm2-135m-p-eagle", "smollm2-135m-eagle3"]
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder of `peagle prepare`")
    parser.add_argument("--held-out-share", type=float, default=0.0, help="0: all rows")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[0, 512, 1024], help="positions; 0: no window"
    )
    parser.add_argument("--spec-tokens", type=int, default=7, help="K")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    for result in measure(args):
        if args.out:
            write_json(args.out, result)
        last = result["cells"][-1]
        print(json.dumps(last | {"by_context": last["by_context"]["all"]}), flush=True)


if __name__ == "__main__":
    main()

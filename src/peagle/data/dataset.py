"""The prepared dataset: a folder of shards that `peagle prepare` writes and training reads.

    manifest.json            what made it, and the list of shards; a file not listed does not exist
    shard-00000.safetensors  token_ids int32 [T], loss_mask uint8 [T], offsets int64 [rows + 1]
    shard-00000.json         id, category, clipped and looping of each row

`loss_mask` is 1 where the target itself generated the token. It comes from generated token ids,
never from matching text. The manifest is replaced last, so a kill loses the open shard alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from peagle.config import changed_values
from peagle.errors import DataError
from peagle.files import check_readable, refusal, write_atomic, write_json

FORMAT = "peagle-dataset-1"
MANIFEST = "manifest.json"
PREPARE_HINT = "prepare it again, or give another --out of peagle prepare"


@dataclass(frozen=True)
class Row:
    """One document: a chat in the target's template with the target's answers."""

    id: str
    token_ids: Sequence[int] | Tensor  # [n]
    loss_mask: Sequence[int] | Tensor  # [n]
    category: str = ""
    clipped: bool = False  # the answer ran into the length limit
    looping: bool = False  # the answer repeats itself


class DatasetWriter:
    """Collects rows and writes them shard by shard; opening the same folder again continues.

    `made_by` says what produced the rows (target, chat template, generation options ...): rows
    of two different specs do not mix.
    """

    def __init__(
        self, folder: Path, made_by: Mapping[str, Any], *, rows_per_shard: int = 4096
    ) -> None:
        self.folder = folder
        self.rows_per_shard = rows_per_shard
        self._pending: list[Row] = []
        self._manifest = self._open(json.loads(json.dumps(made_by)))

    def _open(self, made_by: dict[str, Any]) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / MANIFEST).exists():
            return {"format": FORMAT, "made_by": made_by, "shards": []}
        manifest = read_manifest(self.folder)
        if manifest["made_by"] != made_by:
            changes = changed_values(manifest["made_by"], made_by).items()
            which = "; ".join(f"{name}: {change}" for name, change in changes)
            raise DataError(
                f"{self.folder} was prepared with other options: {which}",
                hint="prepare into a new folder, or repeat its options",
            )
        return manifest

    @property
    def num_rows(self) -> int:
        """Rows that are safe on disk."""
        return int(totals(self._manifest["shards"])["rows"])

    def row_ids(self) -> set[str]:
        """Rows that are already safe on disk: a resumed run skips them."""
        ids: set[str] = set()
        for shard in self._manifest["shards"]:
            ids |= {row["id"] for row in _read_rows(self.folder, shard["name"])}
        return ids

    def add(self, row: Row) -> None:
        if len(row.token_ids) != len(row.loss_mask):
            raise DataError(
                f"row {row.id!r} has {len(row.token_ids)} tokens "
                f"but {len(row.loss_mask)} mask values"
            )
        if len(row.token_ids) == 0:
            raise DataError(f"row {row.id!r} is empty")
        self._pending.append(row)
        if len(self._pending) >= self.rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Makes every row added so far safe. Small shards cost little: call it when in doubt."""
        if not self._pending:
            return
        name = f"shard-{len(self._manifest['shards']):05d}"
        tensors = _join(self._pending)
        write_atomic(self.folder / f"{name}.safetensors", save(tensors))
        rows = [
            {"id": r.id, "category": r.category, "clipped": r.clipped, "looping": r.looping}
            for r in self._pending
        ]
        write_json(self.folder / f"{name}.json", {"rows": rows})
        self._manifest["shards"].append(
            {
                "name": name,
                "rows": len(rows),
                "tokens": len(tensors["token_ids"]),
                "supervised_tokens": int(tensors["loss_mask"].sum()),
            }
        )
        self._manifest["totals"] = totals(self._manifest["shards"])
        write_json(self.folder / MANIFEST, self._manifest)
        self._pending = []


class Dataset:
    """Random access by row. Shards are memory-mapped: a row costs nothing until it is read.

    Rows longer than `max_length` lose their end; `num_cut` says how many do. The rows of `more`
    follow those of `folder`; a prompt answered in several folders keeps its id, and so its side
    of `split`.
    """

    def __init__(
        self, folder: Path, max_length: int | None = None, *, more: Sequence[Path] = ()
    ) -> None:
        self.folder = folder
        self.max_length = max_length
        self.manifest = read_manifest(folder)
        self._made_by = [read_manifest(f)["made_by"] for f in (folder, *more)]
        places = [(f, s) for f in (folder, *more) for s in _shards_of(f)]
        shards = [shard for _, shard in places]
        self.info = [row for f, s in places for row in _read_rows(f, s["name"])]
        self._shards = [_read_shard(f, s) for f, s in places]
        counts = torch.tensor([s["rows"] for s in shards])
        self._first_row = torch.cat((torch.zeros(1, dtype=torch.long), counts.cumsum(0)))
        lengths = torch.cat([s["offsets"].diff() for s in self._shards])
        self.lengths = lengths if max_length is None else lengths.clamp(max=max_length)  # [rows]
        self.num_cut = int((self.lengths < lengths).sum())
        if totals(shards)["supervised_tokens"] == 0:
            raise DataError(
                f"no token of {folder} is supervised: there is nothing to learn from",
                hint="the loss mask must be 1 on the tokens that the target generated",
            )

    def __len__(self) -> int:
        return len(self.info)

    def __getitem__(self, index: int) -> Row:
        shard = int(torch.searchsorted(self._first_row, index, right=True)) - 1
        tensors = self._shards[shard]
        start = int(tensors["offsets"][index - self._first_row[shard]])
        end = start + int(self.lengths[index])
        return Row(
            token_ids=tensors["token_ids"][start:end],
            loss_mask=tensors["loss_mask"][start:end],
            **self.info[index],
        )

    def identity(self) -> dict[str, Any]:
        """What tells whether two datasets hold the same rows, wherever they lie."""
        content = json.dumps([self._made_by, [row["id"] for row in self.info]], sort_keys=True)
        return {
            "rows": len(self),
            "tokens": int(self.lengths.sum()),
            "sha256": hashlib.sha256(content.encode()).hexdigest()[:16],
        }

    def split(self, held_out_share: float) -> tuple[list[int], list[int]]:
        """Row indices to train on and to hold out. A row's side depends on its id alone; the
        further rows of a conversation, `id#2` and so on, are on the first one's."""
        ids = {row["id"] for row in self.info}
        held_out = [is_held_out(_first_row(row["id"], ids), held_out_share) for row in self.info]
        train = [i for i, held in enumerate(held_out) if not held]
        return train, [i for i, held in enumerate(held_out) if held]


def read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a prepared dataset: it has no {MANIFEST}", hint="run `peagle prepare`"
        ) from None
    except OSError as error:
        reason, remedy = refusal(error)
        raise DataError(f"{path} cannot be read: {reason}", hint=remedy) from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint=PREPARE_HINT) from None
    if manifest.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {manifest.get('format')!r}, not {FORMAT!r}", hint=PREPARE_HINT
        )
    return manifest


def _shards_of(folder: Path) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = read_manifest(folder)["shards"]
    if not shards:
        raise DataError(f"{folder} holds no rows", hint="run `peagle prepare` first")
    return shards


def totals(shards: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {key: sum(s[key] for s in shards) for key in ("rows", "tokens", "supervised_tokens")}


def is_held_out(row_id: str, held_out_share: float) -> bool:
    digest = hashlib.sha256(row_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < held_out_share


def _first_row(row_id: str, ids: set[str]) -> str:
    """A `#` may also be part of a user's own id: then no row has the name before it."""
    name, _, number = row_id.rpartition("#")
    return name if number.isdigit() and name in ids else row_id


def _join(rows: Sequence[Row]) -> dict[str, Tensor]:
    lengths = torch.tensor([0] + [len(r.token_ids) for r in rows])
    return {
        "token_ids": torch.cat([torch.as_tensor(r.token_ids, dtype=torch.int32) for r in rows]),
        "loss_mask": torch.cat([torch.as_tensor(r.loss_mask, dtype=torch.uint8) for r in rows]),
        "offsets": lengths.cumsum(0),
    }


def _read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder / name}.json cannot be read: {error}", hint=PREPARE_HINT
        ) from None
    return rows


def _read_shard(folder: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    path = folder / f"{entry['name']}.safetensors"
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            tensors = {
                name: file.get_tensor(name) for name in ("token_ids", "loss_mask", "offsets")
            }
    except OSError as error:
        reason, remedy = refusal(error)
        raise DataError(f"{path} cannot be read: {reason}", hint=remedy) from None
    except SafetensorError as error:
        raise DataError(f"{path} is damaged: {error}", hint=PREPARE_HINT) from None
    sizes = (len(tensors["offsets"]) - 1, len(tensors["token_ids"]), len(tensors["loss_mask"]))
    if sizes != (entry["rows"], entry["tokens"], entry["tokens"]):
        raise DataError(
            f"{path} has (rows, tokens, mask values) {sizes}, but the manifest says "
            f"{entry['rows']} rows of {entry['tokens']} tokens",
            hint="the folder mixes files of two runs: prepare it again",
        )
    return tensors


def check_tokens(dataset: Dataset, indices: list[int], vocab_size: int) -> None:
    for index in indices:
        row = dataset[index]
        largest = int(torch.as_tensor(row.token_ids).max())
        if largest >= vocab_size:
            raise DataError(
                f"row {row.id!r} has token {largest}, but the target's vocabulary is {vocab_size}",
                hint="the data was made with another tokenizer",
            )

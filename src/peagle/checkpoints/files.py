"""Files that are whole or not there: atomic writes, and weights read without surprises."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.checkpoints.locking import try_lock
from peagle.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file so that readers see the old content or the new, through a crash too."""
    data = content.encode() if isinstance(content, str) else content
    remove_leftovers(path)
    temporary = _temporary_sibling(path)
    try:
        with temporary.open("wb") as file:
            try_lock(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _fsync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling that becomes `path` when the block ends without an error.

    An older folder at `path` is replaced. No rename replaces a full folder, so a reader may for
    a moment find none; it never finds a mixture.
    """
    remove_leftovers(path)
    temporary = _temporary_sibling(path)
    temporary.mkdir(parents=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try_lock(descriptor)  # held while we live: tells others that this is no leftover
    try:
        yield temporary
        for entry in (*temporary.rglob("*"), temporary):
            _fsync(entry)
        _replace_folder(temporary, path)
        _fsync(path.parent)
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(path: Path, *, min_age: float = 60.0) -> None:
    """Deletes temporary siblings of `path` whose writers are gone.

    A writer locks its temporary only after making it, so a young one may be in use and not yet
    locked. Who knows that nobody else writes `path` may give `min_age=0`.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError):  # somebody else deletes it, or it is not ours
            if _is_abandoned(leftover, min_age):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{path} is broken: {error}", hint="copy or download the folder again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold a JSON object, not a {type(value).__name__}")
    return value


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files of a model folder, each with the tensors it must hold (None: no index)."""
    if (folder / WEIGHTS_INDEX).is_file():
        return _shards(folder)
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    pickled = sorted(f.name for ending in ("*.bin", "*.pt", "*.pth") for f in folder.glob(ending))
    if pickled:
        raise ModelError(
            f"{folder} has weights only as pickle files ({pickled[0]}), which can run code",
            hint="convert it to safetensors: transformers loads it and save_pretrained writes it",
        )
    raise ModelError(f"{folder} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors of a model folder; reads headers only."""
    return [name for path, listed in weight_files(folder).items() for name in _names(path, listed)]


def iter_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor once, shard by shard, on the CPU and in its stored dtype.

    Tensors view the mapped file: keep those you need, copy before writing into one.
    """
    for path, listed in weight_files(folder).items():
        names = _names(path, listed)
        with _open_weights(path) as weights:
            for name in names:
                yield name, weights.get_tensor(name)


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / WEIGHTS_INDEX} has no weight_map")
    shards: dict[Path, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{folder / WEIGHTS_INDEX} names a shard outside its folder: {shard}")
        shards.setdefault(folder / shard, []).append(name)
    for path in shards:
        if not path.is_file():
            raise ModelError(
                f"{folder} lacks the shard {path.name}", hint="download or copy the folder again"
            )
    return dict(shards)


def _names(path: Path, listed: list[str] | None) -> list[str]:
    with _open_weights(path) as weights:
        held = list(weights.keys())
    missing = sorted(set(listed or ()) - set(held))
    if missing:
        raise ModelError(f"{path} lacks {missing[0]}, which {WEIGHTS_INDEX} says it holds")
    return held if listed is None else listed


def _open_weights(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is truncated or no safetensors file: {error}",
            hint="download or copy it again",
        ) from error


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _replace_folder(new: Path, path: Path) -> None:
    while True:
        try:
            new.rename(path)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        aside = _temporary_sibling(path)
        with contextlib.suppress(FileNotFoundError):  # another writer was faster
            path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _is_abandoned(temporary: Path, min_age: float) -> bool:
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        age = time.time() - os.fstat(descriptor).st_mtime
        unlocked = try_lock(descriptor)
    finally:
        os.close(descriptor)
    return unlocked and age >= min_age


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files and folders that are whole or not there, for whoever reads them at any moment."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peagle.errors import OutputError
from peagle.locking import hold_lock, try_lock

LOCK = ".lock"
_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EACCES: "check its permissions, or name another place",
    errno.EPERM: "check its permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "name a shorter path",
}


class Refusal(NamedTuple):
    """Why the system did not read or write something, and what a user can do."""

    reason: str
    remedy: str


def refusal(error: OSError) -> Refusal:
    return Refusal(error.strerror or str(error), _REMEDIES.get(error.errno or 0, "check the path"))


def as_os_error(error: Exception) -> OSError | None:
    """The file system's error, which safetensors hands on in words; None where it is another."""
    if isinstance(error, OSError):
        return error
    from safetensors import SafetensorError

    code = re.search(r"\(os error (\d+)\)", str(error))
    if code is None or not isinstance(error, SafetensorError):
        return None
    return OSError(int(code[1]), os.strerror(int(code[1])))


@contextlib.contextmanager
def writing(path: Path, *, then: str = "") -> Iterator[None]:
    """What the disk refuses is the user's to mend; `then`: how to go on afterwards."""
    try:
        yield
    except Exception as error:
        refused = as_os_error(error)
        if refused is None:
            raise
        reason, remedy = refusal(refused)
        hint = f"{remedy}, then {then}" if then else remedy
        raise OutputError(f"cannot write to {path}: {reason}", hint=hint) from error


def check_folder(folder: Path) -> None:
    """Refuses what cannot become a folder to write into; makes nothing. For verbs that load for
    seconds before they write."""
    with writing(folder):
        whole = folder.absolute()
        place = next(path for path in (whole, *whole.parents) if path.exists())
        code = errno.ENOTDIR if not place.is_dir() else errno.EACCES
        if code == errno.ENOTDIR or not os.access(place, os.W_OK | os.X_OK):
            raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Makes a folder and holds it alone for the block; a second writer is refused at once."""

    def refuse() -> None:
        raise OutputError(
            f"another process is writing to {folder}",
            hint="wait for it or stop it, or name another folder",
        )

    with contextlib.ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(hold_lock(folder / LOCK, on_wait=refuse))
        yield


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a file so that readers see the old content or the new, through a crash too."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """The same for a JSON document; makes the folder that it lies in."""
    content = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content)


def check_readable(path: Path) -> None:
    """Raises what keeps a file from being read; safetensors would say that it is missing."""
    path.open("rb").close()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields an empty temporary sibling that becomes `path` when the block ends without an error.

    The block must write into that file and not put another in its place. A link is followed: what
    it leads to is replaced. A device or a pipe never is: as root that would break the machine.
    """
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "not a regular file"
        raise OutputError(f"cannot write to {path}: it is {what}", hint="name a file")
    path = Path(os.path.realpath(path))
    remove_leftovers(path)
    temporary = _temporary_sibling(path)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try_lock(descriptor)  # held while we live: tells others that this is not a leftover
    try:
        yield temporary
        os.fsync(descriptor)
        os.replace(temporary, path)
    finally:
        os.close(descriptor)
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
    try_lock(descriptor)
    try:
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # as the umask has it
        for entry in (*temporary.rglob("*"), temporary):
            if entry.is_file():  # safetensors makes its files for their owner alone
                entry.chmod(mode)
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
    _remove_abandoned(path.parent, glob.escape(path.name), min_age)


def remove_all_leftovers(folder: Path) -> None:
    """Deletes every temporary in `folder` whose writer is gone; nobody may be starting to write."""
    _remove_abandoned(folder, "*", 0.0)


def _remove_abandoned(folder: Path, names: str, min_age: float) -> None:
    for leftover in folder.glob(f".{names}.*.tmp"):
        with contextlib.suppress(OSError):  # somebody else deletes it, or it is not ours
            if _is_abandoned(leftover, min_age):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


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

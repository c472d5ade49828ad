"""File locks that the kernel drops when their holder dies, so that no lock outlives a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def hold_lock(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds an exclusive lock on `path` for the block; calls `on_wait` once if it must wait.

    Where the file system has no locks it goes on without one. The lock file stays: deleting it
    would let a third process lock a new file of that name while a second still waits for the
    old one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not try_lock(descriptor) and _has_locks(descriptor):
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Locks an open file or folder if nobody holds it; False also where locks do not exist."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _has_locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        return error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
    return True

"""Compiles C source once with the system's compiler and keeps the library in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from peagle.cache import cache_folder

logger = logging.getLogger(__name__)

# No -ffast-math: NaN and infinity must go through, and sums keep their order.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-w")
TIMEOUT_S = 120


def load_library(*sources: Path, headers: Sequence[Path] = ()) -> ctypes.CDLL | None:
    """The compiled sources, from the cache if they are there; None where that cannot be had."""
    try:
        library = _library_path(sources, headers)
        if not library.is_file():
            _compile(sources, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.info("no compiled CPU kernels, torch's own are used: %s", reason)
        return None


def _library_path(sources: Sequence[Path], headers: Sequence[Path]) -> Path:
    """Named after all that decides the library's content: one cache may serve many machines."""
    texts = (file.read_text(encoding="utf-8") for file in (*sources, *headers))
    key = "\n".join((*texts, *_flags(), _cpu()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / digest / f"{sources[0].stem}.so"


def _flags() -> tuple[str, ...]:
    """What PEAGLE_CFLAGS adds comes last, so that it can take back what -march=native allows."""
    return (*FLAGS, *shlex.split(os.environ.get("PEAGLE_CFLAGS", "")))


def _cpu() -> str:
    """What -march=native depends on: the model and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    telling = ("model name", "flags", "Features", "CPU part")
    found = {line for line in lines if line.startswith(telling)}
    return "\n".join((platform.machine(), platform.system(), *sorted(found)))


def _compile(sources: Sequence[Path], library: Path) -> None:
    """Builds beside the library's place and moves it there: a second process sees all or none."""
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *_flags(), *map(str, sources), "-o", str(made), "-lm"]
        logger.info("compiling CPU kernels, once: %s", shlex.join(command))
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        os.replace(made, library)


def _compiler() -> list[str]:
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise FileNotFoundError("no C compiler: neither $CC nor cc, gcc or clang")

"""The C sources as one library, compiled once by the system's compiler, and its threads.

The library is kept in the cache folder. Where it cannot be compiled there is none, and torch's own
operations run instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch

from peagle.cache import cache_folder
from peagle.progress import track

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("ops.c", "linear.c", "layers.c", "drafts.c"))
HEADERS = tuple(FOLDER / name for name in ("kernels.h", "vectors.h"))
# No -ffast-math: NaN and infinity must go through, and sums keep their order. Products are fused
# into sums where the source says so and nowhere else, lest the bits be the compiler's choice.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-march=native", "-shared", "-fPIC", "-w")
TIMEOUT_S = 120


def cpu_library() -> ctypes.CDLL | None:
    """None if PEAGLE_CPU_KERNELS=0 or it cannot be compiled here."""
    if os.environ.get("PEAGLE_CPU_KERNELS") == "0":
        return None
    return load_library(*SOURCES, headers=HEADERS)


class Threads(ctypes.Structure):
    """How many of torch's threads a kernel may use; `threads` in kernels.h."""

    _fields_ = (("count", c_int64), ("run", c_void_p))

    def __init__(self) -> None:
        """As many as torch uses now."""
        run = run_on_threads()
        super().__init__(torch.get_num_threads() if run else 1, run)


@functools.cache
def run_on_threads() -> int | None:
    """Address of GOMP_parallel as torch itself finds it: preloaded, or the runtime it ships."""
    shipped = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    for path in (None, *map(str, shipped)):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def load_library(*sources: Path, headers: Sequence[Path] = ()) -> ctypes.CDLL | None:
    """The compiled sources, from the cache if they are there; None where that cannot be had."""
    try:
        library = _library_path(sources, headers)
        if not library.is_file():
            _compile(sources, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.info("there are no compiled CPU kernels, so torch's own are used: %s", reason)
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
    compiler = compiler_command()
    if compiler is None:
        raise FileNotFoundError("no C compiler: neither $CC nor cc, gcc or clang")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        command = [*compiler, *_flags(), *map(str, sources), "-o", str(made), "-lm"]
        logger.info("compiling CPU kernels: %s", shlex.join(command))
        with track("compiling CPU kernels, once"):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        os.replace(made, library)


def compiler_command() -> list[str] | None:
    """The compiler of the C kernels; None where there is none."""
    if chosen := os.environ.get("CC"):
        return shlex.split(chosen)
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    return None

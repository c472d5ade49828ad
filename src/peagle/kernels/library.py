"""The C sources as one library, and the threads that they run on."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch

from peagle.kernels.compiling import load_library

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("cpu.c", "linear.c", "layer.c"))
HEADERS = (FOLDER / "kernels.h",)


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

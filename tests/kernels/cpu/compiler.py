"""Whether there must be CPU kernels here: a compiler that refuses our source is to fail tests."""

from __future__ import annotations

import os
import shlex
import shutil

import pytest


def _are_wanted() -> bool:
    chosen = shlex.split(os.environ.get("CC", ""))
    compilers = chosen[:1] or ["cc", "gcc", "clang"]
    return os.environ.get("PEAGLE_CPU_KERNELS") != "0" and any(map(shutil.which, compilers))


needs_kernels = pytest.mark.skipif(not _are_wanted(), reason="no C compiler, or kernels turned off")

"""Where a number came from: hardware, versions, commit, command and time.

Every result file carries one of these, so that a figure can be checked by repeating it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import peagle

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "vllm")


def provenance(*, probe_torch: bool = False) -> dict[str, Any]:
    """One record of this machine and this process.

    The GPU comes from the driver's own tool. `probe_torch` imports torch (a second or more) to
    add what only it knows: the threads it uses and the CUDA version it was built for.
    """
    record: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "hardware": _hardware(),
        "versions": _versions(),
        "git": git_state(Path(__file__).parent),
    }
    if probe_torch:
        record["torch"] = _torch()
    return record


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout we run from, and whether it was changed; None if installed."""
    commit = _output("git", "-C", str(folder), "rev-parse", "HEAD")
    if commit is None or _output("git", "-C", str(folder), "ls-files", __file__) == "":
        return None  # not a checkout, or we sit untracked in somebody else's
    changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    # A container's share, where the system can tell; the whole machine otherwise.
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    listing = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return listing.splitlines() if listing else []


def _versions() -> dict[str, str]:
    versions = {"peagle": peagle.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _torch() -> dict[str, Any]:
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpu_available": torch.cuda.is_available(),
    }


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

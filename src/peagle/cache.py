"""The folder of things that can be made again: fetched models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where peagle keeps what it fetched and converted: PEAGLE_CACHE, else the XDG cache."""
    if own := os.environ.get("PEAGLE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle"

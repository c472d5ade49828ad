"""The files that vLLM's hidden-states connector writes, one per request.

    hidden_states [n, layers, H]   in rising order of layer ids, whatever order was asked for
    token_ids [n]                  compared with ours: states of others would train silently

The lock file beside it is held until the file is whole. The layers stand in the name of the
folder, because the file does not tell them.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import DataError

LOCK_PAUSE = 0.01  # seconds


def read_states(path: Path, timeout: float) -> dict[str, Tensor]:
    """Waits until the file is whole."""
    try:
        _wait_for_writer(path.with_name(path.name + ".lock"), timeout)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"vLLM's hidden states at {path} cannot be read: {error}",
            hint="we and vLLM must see one file system, with room; vllm.folder says where we see "
            "it, and the server's log may say more",
        ) from None


def remove_states(path: Path) -> None:
    for name in (path.name, path.name + ".lock"):
        with contextlib.suppress(OSError):
            path.with_name(name).unlink()


def _wait_for_writer(lock: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with lock.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not written within {timeout:.0f} s") from None
                time.sleep(LOCK_PAUSE)

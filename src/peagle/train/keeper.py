"""keeper.py FOLDER COMMAND ...: runs a command and ends it, children included, when standard
input closes; then deletes the folder.

A trainer that is killed closes its pipes and nothing else. With this process between, a server
that it started never outlives it, and keeps neither GPUs nor files in memory. Run as a file: it
imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

GRACE = 20.0  # seconds between asking and killing
TIDY_UP = 2.0  # seconds for the server's children, when it is gone itself
PAUSE = 0.05


def end_with_input(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock Python wants back when it ends
        pass
    signal_group(process, signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        signal_group(process, signal.SIGKILL)


def signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_rest(process: subprocess.Popen[bytes]) -> None:
    """What the server leaves behind. Most of it ends by itself, when it has tidied up."""
    for _ in range(int(TIDY_UP / PAUSE)):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(PAUSE)
    signal_group(process, signal.SIGKILL)


def main() -> int:
    folder, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_input, args=(process,), daemon=True).start()
    code = process.wait()
    end_rest(process)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

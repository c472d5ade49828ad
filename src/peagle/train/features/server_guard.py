"""python -m ... FOLDER COMMAND ...: runs a command and ends it, children included, when standard
input closes; then deletes the folder.

A trainer that is killed closes its pipes and nothing else. With this process between, a server
that it started never outlives it, and keeps neither GPUs nor files in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

from peagle.processes import end_group

GRACE = 20.0  # seconds between asking and killing
TIDY_UP = 2.0  # seconds for the server's children, when it is gone itself


def end_with_input(group: int) -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock Python wants back when it ends
        pass
    end_group(group, grace=GRACE)


def main() -> int:
    folder, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=end_with_input, args=(process.pid,), daemon=True).start()
    code = process.wait()
    end_group(process.pid, grace=TIDY_UP)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

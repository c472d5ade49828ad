"""Run as a script: ends a process group when the process that holds our stdin is gone.

A parent that is killed cannot clean up, but the kernel closes its end of the pipe. The parent
writes a line when it has cleaned up itself. Uses the standard library alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE = 10.0  # seconds between asking and killing


def group_runs(group: int) -> bool:
    """Whether a process of the group runs. One that only waits to be reaped does not count:
    in a container nobody may ever do it."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    if not os.path.isdir("/proc/self"):
        return True
    return any(_runs_in(group, pid) for pid in os.listdir("/proc") if pid.isdigit())


def _runs_in(group: int, pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _parent, its_group = file.read().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):  # it has just ended
        return False
    return int(its_group) == group and state not in ("Z", "X")


def end_group(group: int, *, grace: float = GRACE) -> None:
    """Asks every process of the group to end, and kills what is left after `grace` seconds."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return
        until = time.monotonic() + patience
        while group_runs(group) and time.monotonic() < until:
            time.sleep(0.05)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the parent's end counts
    if not sys.stdin.readline():
        end_group(int(sys.argv[1]))


if __name__ == "__main__":
    main()

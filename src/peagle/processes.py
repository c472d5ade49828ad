"""Child processes with all their children: started in a process group of their own, and ended.

Run as a script, this file is the guard of one group: it ends the group, and deletes a folder, when
the process that holds its stdin is gone. A parent that is killed cannot clean up, but the kernel
closes its end of the pipe. The parent writes a line when it has cleaned up itself. Hence the
standard library alone at the top.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

GRACE = 20.0  # seconds between asking and killing
TIDY_UP = 2.0  # seconds for a server's children, when it is gone itself
REMEMBERED_LINES = 500
STOP_SECONDS = 30.0  # for a server to end by itself once it was told to


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
    """Asks every process of the group to end, and kills what is left after `grace` seconds, or
    TIDY_UP after its leader is gone."""
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return
        _wait_for_end(group, patience)


def _wait_for_end(group: int, patience: float) -> None:
    until = time.monotonic() + patience
    leader_runs = True
    while group_runs(group) and time.monotonic() < until:
        if leader_runs and not _runs_in(group, str(group)):
            leader_runs = False
            until = min(until, time.monotonic() + TIDY_UP)
        time.sleep(0.05)


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception: what cleans up after Ctrl-C does so after it, too."""


interruptions: list[int] = []  # signals that were raised as exceptions, in this command


def raise_interruption(number: int, _frame: FrameType | None = None) -> None:
    """A handler for SIGINT and SIGTERM. The signal is noted, too: C code that Python interrupts,
    such as torch's reading of a sequence, may make another error of the exception."""
    interruptions.append(number)
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


class StopSignals:
    """SIGINT and SIGTERM as something that a loop can wait for, in the main thread.

    `impatient`: a second one does interrupt.
    """

    def __init__(self, *, impatient: bool = False) -> None:
        self.received: list[int] = []
        self.impatient = impatient
        self._any = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others have no handlers
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        return self._any.wait(seconds)

    def interrupt(self) -> None:
        """Raises what the first signal stands for; nothing where none came."""
        if self.received:
            raise_interruption(self.received[0])

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._any.set()
        if self.impatient and len(self.received) > 1:
            self.interrupt()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """The block is done whole: a signal to stop interrupts when it has ended."""
    with StopSignals(impatient=True) as signals:
        yield
    signals.interrupt()


class GuardedProcess:
    """A process with all its children: a process group of its own, ended with us or by us. A
    `folder` is its own, too, and deleted afterwards."""

    def __init__(
        self,
        words: Sequence[str],
        output: IO[str] | int,
        *,
        variables: Mapping[str, str] | None = None,  # environment beyond the present one
        folder: Path | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(variables or {})},
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on once
        )
        self.group, self.folder = self._process.pid, folder
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self.group), str(folder or "")],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            end_group(self.group)
            raise

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def close(self) -> None:
        """Ends what is left of the group, the process itself included."""
        end_group(self.group)
        self._process.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(b"done\n")


class ServerProcess(GuardedProcess):
    """A server whose log is passed on and remembered."""

    def __init__(self, words: Sequence[str], log: IO[str]) -> None:
        super().__init__(words, subprocess.PIPE)
        self._lines: collections.deque[str] = collections.deque(maxlen=REMEMBERED_LINES)
        self._reader = threading.Thread(target=self._pass_on, args=(log,), daemon=True)
        self._reader.start()

    def stop(self, signals: StopSignals) -> None:
        """Passes the signal on and waits; a second signal, or too long a wait, ends it hard."""
        if signals.received:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signals.received[0])
        until = time.monotonic() + STOP_SECONDS
        while self.exit_code is None and time.monotonic() < until:
            if len(signals.received) > 1:
                end_group(self.group, grace=0.0)
            time.sleep(0.05)

    def close(self) -> None:
        super().close()
        self._reader.join(timeout=2.0)

    @property
    def log_tail(self) -> list[str]:
        return list(self._lines)

    def _pass_on(self, log: IO[str]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            with contextlib.suppress(OSError):  # nobody reads us: go on, or the server blocks
                log.write(line)
                log.flush()


@contextlib.contextmanager
def running(words: Sequence[str], log: IO[str]) -> Iterator[ServerProcess]:
    """The server for the block; nothing of it is left afterwards."""
    try:
        process = ServerProcess(words, log)
    except OSError as error:
        from peagle.errors import BackendError

        raise BackendError(f"cannot start {words[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        process.close()


def _guard() -> None:
    """Waits for the parent's line; ends the group and deletes its folder where none comes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the parent's end counts
    group, folder = sys.argv[1:]
    if not sys.stdin.readline():
        end_group(int(group))
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard()

"""A server as our child: its log passed on, signals handed down, and nothing of it left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from peagle.backends import process_guard
from peagle.backends.process_guard import end_group
from peagle.errors import BackendError

REMEMBERED_LINES = 500
STOP_SECONDS = 30.0  # for the server to end by itself once it was told to


class StopSignals:
    """SIGINT and SIGTERM as something that a loop can wait for."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._any = threading.Event()

    def __enter__(self) -> StopSignals:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> bool:
        return self._any.wait(seconds)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        self._any.set()


class ServerProcess:
    """A server with all its children: a process group of its own, ended with us or by us."""

    def __init__(self, words: Sequence[str], log: IO[str]) -> None:
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on once
        )
        self.group = self._process.pid
        try:
            self._guard = subprocess.Popen(
                [sys.executable, process_guard.__file__, str(self.group)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError:
            end_group(self.group)
            raise
        self._lines: collections.deque[str] = collections.deque(maxlen=REMEMBERED_LINES)
        self._reader = threading.Thread(target=self._pass_on, args=(log,), daemon=True)
        self._reader.start()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

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
        """Ends what is left of the group, the process itself included."""
        end_group(self.group)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(b"done\n")
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
    try:
        process = ServerProcess(words, log)
    except OSError as error:
        raise BackendError(f"cannot start {words[0]}: {error.strerror}") from error
    try:
        yield process
    finally:
        process.close()

"""vLLM's server as a child process: awaited until it answers, and its death explained."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from typing import IO

from peagle.backends.vllm.log import last_words
from peagle.errors import BackendError, ConfigError
from peagle.http import cannot_listen, is_healthy
from peagle.processes import ServerProcess, StopSignals, running

POLL_SECONDS = 0.5


def serve(
    words: Sequence[str],
    *,
    health_url: str | None,
    log: IO[str],
    on_ready: Callable[[], None],
) -> int:
    """Runs vLLM until it is told to stop; the signal's number. A vLLM that dies is an error."""
    with StopSignals() as signals:
        with running(words, log) as process:
            ready = _wait_for_end(process, signals, health_url, on_ready)
            if signals.received:
                process.stop(signals)
        # The whole group is gone, so its log is complete.
        if signals.received:
            return signals.received[0]
        when = "stopped" if ready else "died at its start"
        raise BackendError(f"vLLM {when}: {_last_words(process)}", hint="its log is above")


def _wait_for_end(
    process: ServerProcess,
    signals: StopSignals,
    health_url: str | None,
    on_ready: Callable[[], None],
) -> bool:
    """Until the process ends or a signal comes; whether it was ready before."""
    ready = health_url is None
    while process.exit_code is None and not signals.wait(POLL_SECONDS):
        if health_url and not ready and is_healthy(health_url):
            ready = True
            on_ready()
    return ready


def _last_words(process: ServerProcess) -> str:
    code = process.exit_code
    if code is None or code >= 0:
        return last_words(process.log_tail)
    name = signal.Signals(-code).name
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def check_port_is_free(host: str | None, port: int) -> None:
    """vLLM loads the model before it finds out."""
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host or "", port))
        except OSError as error:
            raise cannot_listen(host, port, error) from error
        except OverflowError:
            raise ConfigError(f"--port {port} is out of range", hint="use 1 to 65535") from None

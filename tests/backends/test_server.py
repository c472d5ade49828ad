"""A child that is started, awaited and stopped, and that never outlives us."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle import processes
from peagle.backends.vllm import server
from peagle.backends.vllm.server import check_port_is_free, serve
from peagle.errors import BackendError, ConfigError
from peagle.processes import end_group

from .fake_vllm import free_port, is_running, write_fake_vllm


class Fake:
    """The fake vLLM, ready to be started."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.words = [str(write_fake_vllm(folder)), "serve", "org/m", "--port", str(self.port)]
        self.url = f"http://127.0.0.1:{self.port}/health"
        self.log = io.StringIO()
        self._pids = folder / "pids"

    def serve(self, on_ready: Callable[[], None] = lambda: None) -> int:
        return serve(self.words, health_url=self.url, log=self.log, on_ready=on_ready)

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in self._pids.read_text().split()]

    def assert_gone(self) -> None:
        until = time.monotonic() + 10
        while any(map(is_running, self.pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert [pid for pid in self.pids if is_running(pid)] == []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))
    monkeypatch.setattr(server, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(
        processes, "end_group", lambda group, grace=0.5: end_group(group, grace=grace)
    )
    return Fake(tmp_path)


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_ready_server_and_all_its_children(fake: Fake, number: int) -> None:
    before = signal.getsignal(number)
    assert fake.serve(on_ready=_send(number)) == number
    fake.assert_gone()
    assert signal.getsignal(number) is before
    assert "INFO starting serve org/m" in fake.log.getvalue()


def test_a_server_that_ignores_the_signal_is_ended_by_a_second_one(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "stubborn")

    def stop_twice() -> None:
        _send(signal.SIGTERM)()
        threading.Timer(0.3, _send(signal.SIGTERM)).start()

    started = time.monotonic()
    assert fake.serve(on_ready=stop_twice) == signal.SIGTERM
    assert time.monotonic() - started < processes.STOP_SECONDS / 2
    fake.assert_gone()


def test_a_server_that_dies_at_its_start_leaves_its_last_words(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    with pytest.raises(BackendError) as caught:
        fake.serve()
    assert caught.value.message == "vLLM died at its start: ValueError: no such head"
    fake.assert_gone()


def test_a_server_that_is_shot_is_reported_as_shot(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "shot")
    with pytest.raises(BackendError, match="killed by SIGKILL"):
        fake.serve()
    fake.assert_gone()


def test_a_server_that_dies_later_is_an_error_too(fake: Fake) -> None:
    with pytest.raises(BackendError, match="vLLM stopped: killed by SIGKILL"):
        fake.serve(on_ready=lambda: os.kill(fake.pids[0], signal.SIGKILL))
    fake.assert_gone()


def test_a_program_that_cannot_be_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot start"):
        serve([str(tmp_path / "no")], health_url=None, log=io.StringIO(), on_ready=lambda: None)


@pytest.mark.slow
def test_nothing_is_left_when_we_are_killed(fake: Fake) -> None:
    code = (
        "import sys; from peagle.backends.vllm.server import serve\n"
        "serve(sys.argv[2:], health_url=sys.argv[1], log=sys.stderr,"
        " on_ready=lambda: print('ready', flush=True))"
    )
    us = subprocess.Popen(
        [sys.executable, "-c", code, fake.url, *fake.words], stdout=subprocess.PIPE, text=True
    )
    assert us.stdout is not None
    assert us.stdout.readline() == "ready\n"
    assert all(map(is_running, fake.pids))
    us.kill()
    us.wait()
    us.stdout.close()
    fake.assert_gone()


def test_what_ignores_a_request_to_end_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    end_group(process.pid, grace=0.2)
    reaper.join(5)
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_port_in_use_is_found_before_the_start(host: str | None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}: Address already in use") as caught:
            check_port_is_free(host, port)
        assert "--port" in str(caught.value.hint)
    check_port_is_free(host, port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        check_port_is_free(None, port)

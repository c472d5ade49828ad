"""`peagle serve` as a process: ready when warm, drained when told to stop, whole after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.backends.fake_vllm import free_port, is_running

from .running import PATIENCE, wait_for

LONG = {"prompt": "abc", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


class Process:
    """`peagle serve` with a tiny model, on a port."""

    def __init__(self, model: Path, port: int, *args: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "peagle", "serve", str(model), "--port", str(port)]
        self.popen = subprocess.Popen(
            [*words, "--device", "cpu", "--dtype", "float32", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines += self.popen.stderr  # line by line, as they come

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.popen.poll() is not None or self.status("/health") == 200)
        assert self.popen.poll() is None, self.lines

    def status(self, path: str) -> int | None:
        try:
            return httpx.get(self.url + path).status_code
        except httpx.HTTPError:
            return None

    def children(self) -> list[int]:
        file = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(pid) for pid in file.read_text().split()]

    def end(self) -> tuple[int, list[str]]:
        code = self.popen.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code, self.lines


@contextmanager
def process(model: Path, port: int, *args: str) -> Iterator[Process]:
    made = Process(model, port, *args)
    try:
        yield made
    finally:
        if made.popen.poll() is None:
            made.popen.kill()
            made.popen.wait()


@pytest.mark.slow
def test_a_killed_server_leaves_nothing_and_starts_again(
    model_folder: Path, head_folder: Path
) -> None:
    port = free_port()
    with process(model_folder, port, "--spec-model", str(head_folder)) as first:
        wait_for(lambda: first.status("/version") == 200)
        assert first.status("/health") in (200, 503)  # 503 until the model is there
        first.wait_until_ready()
        children = first.children()
        assert children
        with httpx.stream("POST", f"{first.url}/v1/completions", json=LONG | {"stream": True}):
            first.popen.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(is_running(pid) for pid in children))
    with process(model_folder, port, "--spec-model", str(head_folder)) as second:
        second.wait_until_ready()
        answer = httpx.post(f"{second.url}/v1/completions", json=LONG | {"max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3

        # The engine's process dies: the server says so, and does not stay behind.
        for pid in second.children():
            os.kill(pid, signal.SIGKILL)
        code, lines = second.end()
    assert code == 2
    assert any(line.startswith("error: the engine has stopped") for line in lines)


@pytest.mark.slow
def test_open_answers_are_finished_before_a_server_ends(model_folder: Path) -> None:
    with process(model_folder, free_port()) as running:
        running.wait_until_ready()
        with httpx.stream(
            "POST", f"{running.url}/v1/completions", json=LONG | {"stream": True}
        ) as answer:
            pieces = answer.iter_lines()
            next(pieces)
            running.popen.send_signal(signal.SIGTERM)
            wait_for(lambda: running.status("/health") is None)  # nobody new gets in
            lines = [line for line in pieces if line]
        assert lines[-1] == "data: [DONE]"
        ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
        assert ends[-1] == "length"
        code, log = running.end()
    assert code == 0
    assert not any("Traceback" in line for line in log)
    records: list[Any] = [json.loads(line) for line in log if line.startswith("{")]
    assert [r["completion_tokens"] for r in records if r["path"] == "/v1/completions"] == [480]

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
from prometheus_client.parser import text_string_to_metric_families

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
def test_a_killed_server_starts_again_and_a_stopped_one_finishes_its_answers(
    model_folder: Path, head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two API servers. What one of them counted, both tell."""
    port = free_port()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    two = ("--api-server-count", "2")
    with process(model_folder, port, "--spec-model", str(head_folder), *two) as first:
        wait_for(lambda: first.status("/version") == 200)
        assert first.status("/health") in (200, 503)  # 503 until the model is there
        first.wait_until_ready()
        children = first.children()
        assert len(children) == 3  # the engine, the other API server, and who watches over both
        with httpx.stream("POST", f"{first.url}/v1/completions", json=LONG | {"stream": True}):
            first.popen.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(is_running(pid) for pid in children))
    assert not [*tmp_path.iterdir()]
    with process(model_folder, port, *two) as second:
        second.wait_until_ready()
        check_that_all_api_servers_count_together(second)
        check_that_open_answers_are_finished(second)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_end_of_an_api_server_ends_the_server_when_open_answers_are_finished(
    model_folder: Path,
) -> None:
    with process(model_folder, free_port(), "--api-server-count", "2") as running:
        running.wait_until_ready()
        body = LONG | {"stream": True}
        # The system deals them out by chance: hardly all of so many to the one that is killed.
        connections = [httpx.Client() for _ in range(16)]
        streams = [
            c.stream("POST", f"{running.url}/v1/completions", json=body) for c in connections
        ]
        answers = [stream.__enter__() for stream in streams]
        os.kill(running.children()[-1], signal.SIGKILL)
        ends = [rest_of(answer) for answer in answers]
        code, log = running.end()
    assert code == 2
    assert "error: peagle-api-server-1 has ended" in "".join(log)
    assert all(end is None or end.endswith("data: [DONE]\n\n") for end in ends)
    assert any(ends)


@pytest.mark.slow
def test_the_second_signal_ends_at_once_and_that_is_no_error(model_folder: Path) -> None:
    endless = LONG | {"n": 64, "temperature": 1, "stream": True}
    with process(model_folder, free_port(), "--shutdown-timeout", "600") as running:
        running.wait_until_ready()
        with httpx.stream("POST", f"{running.url}/v1/completions", json=endless) as answer:
            next(answer.iter_bytes())
            running.popen.send_signal(signal.SIGTERM)
            wait_for(lambda: running.status("/health") is None)
            running.popen.send_signal(signal.SIGTERM)
            code, log = running.end()
    assert code == 0
    assert "Traceback" not in "".join(log)


def rest_of(answer: httpx.Response) -> str | None:
    """None: it broke off."""
    try:
        return answer.read().decode()
    except httpx.HTTPError:
        return None


def check_that_all_api_servers_count_together(running: Process) -> None:
    """Each request comes over a connection of its own, which either may accept."""
    body = {"prompt": "abc", "max_tokens": 3, "ignore_eos": True}
    for _ in range(12):
        assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200
    for _ in range(6):
        page = httpx.get(f"{running.url}/metrics").text
        counts = {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}
        assert counts["vllm:generation_tokens_total"] == 36
        assert counts["vllm:time_to_first_token_seconds_count"] == 12
        assert counts["vllm:kv_cache_usage_perc"] == counts["vllm:num_requests_running"] == 0


def check_that_open_answers_are_finished(running: Process) -> None:
    """SIGTERM in the middle of a stream: nobody new gets in, and the stream goes on to its end."""
    body = LONG | {"stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
        pieces = answer.iter_lines()
        next(pieces)
        running.popen.send_signal(signal.SIGTERM)
        wait_for(lambda: running.status("/health") is None)
        lines = [line for line in pieces if line]
    assert lines[-1] == "data: [DONE]"
    ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
    assert ends[-1] == "length"
    code, log = running.end()
    assert code == 0
    assert not any("Traceback" in line for line in log)
    records: list[Any] = [json.loads(line) for line in log if line.startswith("{")]
    counts = [r["completion_tokens"] for r in records if r["path"] == "/v1/completions"]
    assert counts[-1] == 480

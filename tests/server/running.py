"""A server in this process: the engine's loop and uvicorn in a thread each, on a free port."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from peagle.engine.llm import LLM
from peagle.server.app import Service
from peagle.server.config import ServerConfig
from peagle.server.engine_loop import run_engine
from peagle.server.serving import ApiServerSetup, HttpServer, listen

NAME = "tiny"
PATIENCE = 60.0  # seconds; a loaded machine is slow


@dataclass
class RunningServer:
    url: str
    llm: LLM  # of the engine's thread: look at it only when it is idle
    service: Service
    api_key: str | None = None

    def client(self, **options: Any) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, **options)

    def wait_until_idle(self) -> None:
        """All requests are closed and every block is back."""
        allocator = self.llm.engine.allocator
        wait_for(
            lambda: (
                self.service.llm.num_open == 0
                and not self.llm.engine.has_unfinished
                and allocator.num_free == allocator.num_blocks
            )
        )


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


@contextmanager
def running_server(
    make_llm: Callable[[], LLM], *, api_key: str | None = None, **options: Any
) -> Iterator[RunningServer]:
    ours, theirs = multiprocessing.Pipe()
    made: list[LLM] = []

    def make() -> LLM:
        made.append(make_llm())
        return made[0]

    engine = threading.Thread(target=run_engine, args=([theirs], make), daemon=True)
    engine.start()
    wait_for(lambda: bool(made) or not engine.is_alive())
    assert made, "the engine did not start"
    config = ServerConfig(**{"log_requests": False, **options})
    service = ApiServerSetup([NAME], made[0].model_path, config, api_key).service(ours)
    listener = listen("127.0.0.1", 0)
    told, control = multiprocessing.Pipe()  # signals are the main thread's
    server = HttpServer(service, api_key, control=control)
    http = threading.Thread(target=server.run, args=([listener],), daemon=True)
    http.start()
    url = f"http://127.0.0.1:{_port(listener)}"
    try:
        wait_for(lambda: service.llm.ready is not None)
        yield RunningServer(url, made[0], service, api_key)
    finally:
        told.send_bytes(b"stop")
        http.join(PATIENCE)
        engine.join(PATIENCE)
        assert not engine.is_alive()
        assert not http.is_alive()


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])

"""Starts the engine's process and the HTTP server, and ends both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.detokenizer import decoder_of
from peagle.errors import BackendError, ConfigError
from peagle.server.app import Service, make_app
from peagle.server.async_llm import AsyncLLM
from peagle.server.config import API_KEY_VARIABLE, ServerConfig, read_api_key
from peagle.server.engine_loop import engine_process
from peagle.server.errors import ApiError
from peagle.server.guards import JsonLines
from peagle.server.metrics import ServerMetrics
from peagle.server.prompts import PromptRenderer

BACKLOG = 2048
KEEP_ALIVE = 30  # seconds that an idle connection stays open
END_SECONDS = 5.0  # for the engine's process, when its connection is closed


def serve(
    model: str,
    config: ServerConfig,
    engine: EngineConfig,
    drafter: SpeculativeConfig | None,
    note: Callable[[str], None],
) -> int | None:
    """Serves until a signal comes; -> its number. Raises PeagleError where the engine fails."""
    # 1. What can be wrong without the model is reported before it is loaded.
    api_key = read_api_key(config, os.environ.get(API_KEY_VARIABLE))
    listener = listen(config.host, config.port)
    if not config.is_loopback and api_key is None:
        note("warning: everybody who reaches this address may use it; --api-key-file sets a key")
    folder = resolve_model(model)
    # 2. The engine loads in its own process, while HTTP already says that it is not ready.
    with listener, engine_connection(folder, engine, drafter) as connection:
        service = make_service(names_of(model, config), folder, config, connection)
        app = make_app(service, api_key)
        log_to_stderr()
        server = HttpServer(uvicorn_config(app, config), service.llm)
        host, port = listener.getsockname()[:2]
        scheme = "https" if config.ssl_certfile else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        server.on_ready = lambda: note(f"ready: {address}/v1")
        asyncio.run(server.serve([listener]))
    failure = service.llm.failure
    if server.received is None and failure is not None:
        if failure.is_users:
            raise ConfigError(failure.message, hint=failure.hint)
        raise BackendError(
            f"the engine has stopped: {failure.message}", hint="its log stands above"
        )
    return server.received


def make_service(names: list[str], folder: Path, config: ServerConfig, connection: Any) -> Service:
    tokenizer = load_tokenizer(folder)
    metrics = ServerMetrics(names[0])
    llm = AsyncLLM(
        connection,
        decoder_of(tokenizer),
        max_waiting=config.max_waiting_requests,
        timeout=config.request_timeout,
        observe=metrics.observe,
    )
    return Service(names, config, llm, PromptRenderer(tokenizer), metrics)


def names_of(model: str, config: ServerConfig) -> list[str]:
    """A folder is called by its last part: where it lies is nobody's business."""
    if config.served_model_name is not None:
        return [config.served_model_name]
    return [Path(model).resolve().name, model] if Path(model).is_dir() else [model]


@contextlib.contextmanager
def engine_connection(
    folder: Path, engine: EngineConfig, drafter: SpeculativeConfig | None
) -> Iterator[Any]:
    """The engine's process, and the connection to it. It ends when the connection is closed, be
    it by us or because we were killed."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and threads
    ours, theirs = context.Pipe()
    process = context.Process(
        target=engine_process,
        args=(theirs, str(folder), engine, drafter),
        name="peagle-engine",
        daemon=True,
    )
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.close()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


class HttpConnection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """One that sends no whole head of a request in time is closed: it costs a client nothing to
    open very many of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._closing = self.loop.call_later(KEEP_ALIVE, self._close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            self._closing.cancel()
        elif self._closing.cancelled():
            self._closing = self.loop.call_later(KEEP_ALIVE, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing.cancel()
        super().connection_lost(exc)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close(self) -> None:
        if not self._is_answering():
            self.transport.close()


class HttpServer(uvicorn.Server):
    """Drains on the first signal, ends at once on the second; ends, too, when the engine has."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM) -> None:
        super().__init__(config)
        self._llm = llm
        self.received: int | None = None
        self.on_ready: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number)
        watching = loop.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self.handle_exit(number, None)
        self.received = self.received or number

    async def _watch(self) -> None:
        with contextlib.suppress(ApiError):
            await self._llm.wait_until_ready()
            self.on_ready()
        await self._llm.wait_for_failure()
        self.should_exit = True


def uvicorn_config(app: Any, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, int(config.shutdown_timeout)),
        ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
        ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
    )


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint="stop what uses the port, or choose another with --port",
        ) from None
    return listener


def log_to_stderr() -> None:
    """One JSON line for each record of ours and of uvicorn's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("peagle.server", "INFO"), ("uvicorn.error", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

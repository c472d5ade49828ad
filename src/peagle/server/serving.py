"""Starts the engine's process and the API servers, and ends them.

The first API server is this process; it starts the others and the engine, takes the signals, and
ends when one of them does. All accept connections from one listening socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from peagle.checkpoints.references import load_tokenizer, resolve_model
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.engine.detokenizer import decoder_of
from peagle.errors import BackendError, ConfigError
from peagle.http import cannot_listen
from peagle.server.app import Service, make_app
from peagle.server.async_llm import AsyncLLM, OpenAnswers
from peagle.server.config import (
    API_KEY_VARIABLE,
    ServerConfig,
    check_certificate,
    read_api_key,
)
from peagle.server.engine_loop import engine_process
from peagle.server.errors import ApiError
from peagle.server.guards import JsonLines
from peagle.server.metrics import ServerMetrics
from peagle.server.prompts import PromptRenderer

BACKLOG = 2048
KEEP_ALIVE = 30  # seconds that an idle connection stays open
STALLED = 120  # seconds for a client to take what was sent
MAX_HEAD_BYTES = 1 << 19  # of a request, above the 256 KiB that asyncio reads at once
END_SECONDS = 5.0  # for a process, when its connection is closed
API_SERVERS_ON_GPU = 4  # most of them by default
CORES_PER_API_SERVER = 4  # the engine, the clients and what else runs want theirs
NVIDIA_DRIVER = Path("/dev/nvidiactl")  # asking torch would load it


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
    check_certificate(config)
    listener = listen(config.host, config.port)
    if not config.is_loopback and api_key is None:
        note("warning: everybody who reaches this address may use it; --api-key-file sets a key")
    folder = resolve_model(model)
    count = config.api_server_count or default_api_server_count(engine.device)
    # 2. The engine loads in its own process, while HTTP already says that it is not ready.
    with listener, started_engine(count, engine_process, str(folder), engine, drafter) as channels:
        setup = ApiServerSetup(names_of(model, config), folder, config, api_key)
        return serve_http(setup, listener, channels, note)


def default_api_server_count(device: str) -> int:
    """One beside an engine on a CPU, which wants the cores itself and is slower than one API
    server. A GPU can be faster than one."""
    on_gpu = device.startswith("cuda") or (device == "auto" and NVIDIA_DRIVER.exists())
    spare = len(os.sched_getaffinity(0)) // CORES_PER_API_SERVER
    return max(1, min(API_SERVERS_ON_GPU, spare)) if on_gpu else 1


@contextlib.contextmanager
def started_engine(
    num_channels: int, main: Callable[..., None], *args: Any
) -> Iterator[list[Connection]]:
    """The engine's process, and a channel to it for each API server. It ends when all are closed,
    be it by us or because we were killed. `main` takes its ends of them, then `args`."""
    context = multiprocessing.get_context("spawn")  # a fork would share CUDA and threads
    pairs = [context.Pipe() for _ in range(num_channels)]
    ours, theirs = [own for own, _ in pairs], [other for _, other in pairs]
    process = context.Process(target=main, args=(theirs, *args), name="peagle-engine", daemon=True)
    process.start()
    for channel in theirs:
        channel.close()
    try:
        yield ours
    finally:
        for channel in ours:
            with contextlib.suppress(OSError):
                channel.close()
        _end(process)


def _end(process: BaseProcess) -> None:
    process.join(END_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


@dataclass(frozen=True)
class ApiServerSetup:
    """What an API server is told, beside its socket and its channel."""

    names: Sequence[str]
    folder: Path
    config: ServerConfig
    api_key: str | None
    number: int = 0  # among the API servers
    open_answers: Any = field(default_factory=lambda: [0])  # of each of them, shared
    metrics_folder: Path | None = None  # shared
    created: int = field(default_factory=lambda: int(time.time()))

    def service(self, channel: Any) -> Service:
        tokenizer = load_tokenizer(self.folder)
        metrics = ServerMetrics(self.names[0], self.metrics_folder)
        llm = AsyncLLM(
            channel,
            decoder_of(tokenizer),
            max_waiting=self.config.max_waiting_requests,
            timeout=self.config.request_timeout,
            observer=metrics,
            answers=OpenAnswers(self.open_answers, self.number),
        )
        renderer = PromptRenderer(tokenizer)
        return Service(self.names, self.config, llm, renderer, metrics, self.created)


def serve_http(
    setup: ApiServerSetup,
    listener: socket.socket,
    channels: Sequence[Connection],
    note: Callable[[str], None],
) -> int | None:
    """As many API servers as there are channels; -> the signal that ended them."""
    with other_api_servers(setup, listener, channels[1:]) as (setup, others):
        service = setup.service(channels[0])
        log_to_stderr()
        server = HttpServer(service, setup.api_key, others)
        host, port = listener.getsockname()[:2]
        scheme = "https" if setup.config.ssl_certfile else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        server.on_ready = lambda: note(f"ready: {address}/v1")
        asyncio.run(server.serve([listener]))
        for one in others:  # they finish their answers
            one.process.join(setup.config.shutdown_timeout)
    failure, hint = service.llm.failure, "its log stands above"
    if server.received is None and server.lost is not None:
        raise BackendError(f"{server.lost.process.name} has ended", hint=hint)
    if server.received is None and failure is not None:
        if failure.is_users:
            raise ConfigError(failure.message, hint=failure.hint)
        raise BackendError(f"the engine has stopped: {failure.message}", hint=hint)
    return server.received


@dataclass(frozen=True, eq=False)
class OtherApiServer:
    """One in a process of its own. It stops when it gets a message, at once with the second or
    when `control` is closed, be it by us or because we were killed."""

    process: BaseProcess
    control: Connection

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.control.send_bytes(b"stop")


@contextlib.contextmanager
def other_api_servers(
    setup: ApiServerSetup, listener: socket.socket, channels: Sequence[Connection]
) -> Iterator[tuple[ApiServerSetup, list[OtherApiServer]]]:
    """-> the setup of the first one, completed, and the others."""
    if not channels:
        yield setup, []
        return
    context = multiprocessing.get_context("spawn")
    others: list[OtherApiServer] = []
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="peagle-metrics-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        counts = context.RawArray("q", 1 + len(channels))
        setup = replace(setup, open_answers=counts, metrics_folder=folder)
        for number, channel in enumerate(channels, start=1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=api_server_process,
                args=(replace(setup, number=number), listener, channel, theirs),
                name=f"peagle-api-server-{number}",
                daemon=True,
            )
            process.start()
            stack.callback(_end, process)
            stack.callback(ours.close)
            theirs.close()
            channel.close()
            others.append(OtherApiServer(process, ours))
        yield setup, others


def api_server_process(
    setup: ApiServerSetup, listener: socket.socket, channel: Connection, control: Connection
) -> None:
    """The main function of the other API servers. Signals are for the first one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_stderr()
    server = HttpServer(setup.service(channel), setup.api_key, control=control)
    asyncio.run(server.serve([listener]))
    if server.is_orphan and setup.metrics_folder is not None:
        shutil.rmtree(setup.metrics_folder, ignore_errors=True)


def names_of(model: str, config: ServerConfig) -> list[str]:
    """A folder is called by its last part: where it lies is nobody's business."""
    if config.served_model_name is not None:
        return [config.served_model_name]
    return [Path(model).resolve().name, model] if Path(model).is_dir() else [model]


class HeadWithBody:
    """A transport that sends the head of an answer together with the first piece of its body,
    where that is there: a packet less for a client to wake up for."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not self._head:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpConnection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """One that sends no whole head of a request in time is closed: it costs a client nothing to
    open very many of them. So is one whose heads, or frames of a body's pieces, do not end:
    httptools gathers them without a limit, and copies what it has for every piece."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(HeadWithBody(transport, self.loop))
        self._closing = self.loop.call_later(KEEP_ALIVE, self._close)
        self._num_allowed = MAX_HEAD_BYTES  # more to come, beside a body

    def on_message_begin(self) -> None:
        self._num_allowed = MAX_HEAD_BYTES
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._num_allowed += 7 * len(body)  # a piece of one byte has six around it
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_allowed -= len(data)
        if self._num_allowed < 0:
            self.transport.close()
            return
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
    """One API server. Drains on the first signal, ends at once on the second; ends, too, when the
    engine or another API server has. With `control` it is told what to do there."""

    def __init__(
        self,
        service: Service,
        api_key: str | None,
        others: Sequence[OtherApiServer] = (),
        control: Connection | None = None,
    ) -> None:
        super().__init__(uvicorn_config(make_app(service, api_key), service.config))
        self._llm, self._others, self._control = service.llm, others, control
        self.received: int | None = None
        self.lost: OtherApiServer | None = None  # one that has ended by itself
        self.is_orphan = False
        self.on_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio accepts as many connections at a time as the backlog is long. With several API
        servers each should take one and leave the next to whoever is free."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn leaves the app's own end out when it is hurried, which would be logged as an
        error of it."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = () if self._control is not None else (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop, number)
        for one in self._others:
            loop.add_reader(one.control.fileno(), self._lose, one)
        if self._control is not None:
            loop.add_reader(self._control.fileno(), self._obey, self._control)
        watching = loop.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self.received = self.received or number
        self._exit()

    def _exit(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        for one in self._others:
            one.stop()

    def _obey(self, control: Connection) -> None:
        try:
            control.recv_bytes()
            self._exit()
        except (EOFError, OSError):
            self.should_exit = self.force_exit = self.is_orphan = True
            asyncio.get_running_loop().remove_reader(control.fileno())

    def _lose(self, one: OtherApiServer) -> None:
        """They never write: this is the end of one."""
        asyncio.get_running_loop().remove_reader(one.control.fileno())
        if not self.should_exit:
            self.lost = one
            self._exit()

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
        backlog=1,  # connections that are accepted at a time; see HttpServer.startup
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, int(config.shutdown_timeout)),
        ssl_keyfile=None if config.ssl_keyfile is None else str(config.ssl_keyfile),
        ssl_certfile=None if config.ssl_certfile is None else str(config.ssl_certfile),
    )


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Else the second piece of an answer waits until the client
    # has acknowledged the first, which may take it 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # One that has gone without a word, or does not read, would keep its connection.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED * 1000)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from None
    return listener


def log_to_stderr() -> None:
    """One JSON line for each record of ours and of uvicorn's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("peagle.server", "INFO"), ("uvicorn.error", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)

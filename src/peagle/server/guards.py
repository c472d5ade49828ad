"""What is checked and written around every request: key, host, size, headers, ids, logs.

Plain ASGI: what wraps every chunk of a stream has to be cheap.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.async_llm import Generation
from peagle.server.errors import ApiError

logger = logging.getLogger("peagle.server")

OPEN_PATHS = ("/", "/health", "/version")  # without a key
POLLED = ("/health", "/metrics")  # by machines, all the time
BODY_SECONDS = 60.0  # for a request's body to arrive
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
NOTHING = b"default-src 'none'; frame-ancestors 'none'"  # what a document may load, unless it says


@dataclass
class Guards:
    """Around the app. `observe` hears of every answer: handler, method, status, seconds.

    `only_local_hosts` is for a server that only this machine reaches: a web page may have a name
    of its own resolve to 127.0.0.1, and then read what it gets from there.
    """

    app: ASGIApp
    api_key: str | None
    max_body_bytes: int
    only_local_hosts: bool
    log_requests: bool
    observe: Callable[[str, str, int, float], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, send)
        scope.setdefault("state", {})["request_id"] = exchange.request_id
        try:
            refused = self._refusal(scope, exchange.headers)
            if refused is not None:
                await refused.response(scope, receive, exchange.send)
            else:
                await self.app(scope, self._limited(receive), exchange.send)
        finally:
            self._report(exchange)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if self.only_local_hosts and not _is_local(headers.get(b"host", b"")):
            return ApiError(403, "this server answers to this machine's own names alone")
        if self.api_key is not None and scope["path"] not in OPEN_PATHS:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(key, self.api_key.encode())
            if scheme.lower() != b"bearer" or not is_right:
                return ApiError(
                    401,
                    "the API key is missing or wrong",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return self._too_long()
        return None

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self.max_body_bytes} bytes")

    def _limited(self, receive: Receive) -> Receive:
        """A body may come in pieces, without saying how long it is, and slowly."""
        num_bytes, is_whole = 0, False
        until = asyncio.get_running_loop().time() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            try:
                async with asyncio.timeout_at(None if is_whole else until):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body took longer than {BODY_SECONDS:g} s") from None
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:
                raise HTTPException(413, self._too_long().message)
            return message

        return limited

    def _report(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.began
        self.observe(exchange.handler, exchange.method, exchange.status, seconds)
        level = logging.DEBUG if exchange.handler in POLLED else logging.INFO
        if self.log_requests and logger.isEnabledFor(level):
            logger.log(level, exchange.line(seconds))


class Exchange:
    """One request and its answer, for headers and the log."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.monotonic()
        self.scope, self._send = scope, send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.method: str = scope["method"]
        self.status = 0

    @property
    def handler(self) -> str:
        """The route's path, which the app finds; never what a client wrote."""
        route = self.scope.get("route")
        return "none" if route is None else str(route.path)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name for name, _ in message["headers"]}
            added = [*HEADERS, (b"content-security-policy", NOTHING)]
            message["headers"] = [
                *message["headers"],
                (b"x-request-id", self.request_id.encode()),
                *(pair for pair in added if pair[0] not in own),
            ]
        await self._send(message)

    def line(self, seconds: float) -> str:
        fields: dict[str, Any] = {
            "event": "request",
            "request_id": self.request_id,
            "method": self.method,
            "path": self.handler,
            "status": self.status,
            "seconds": round(seconds, 4),
        }
        generation: Generation | None = self.scope["state"].get("generation")
        if generation is not None:
            fields["prompt_tokens"] = generation.num_prompt_tokens
            fields["completion_tokens"] = generation.num_output_tokens
        return json.dumps(fields)


class JsonLines(logging.Formatter):
    """A record as one JSON line; messages that are objects already keep their keys."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        fields = json.loads(message) if message.startswith("{") else {"event": message}
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(head | fields)


def _is_local(host: bytes) -> bool:
    """A name, or an address of this machine's own, of which there are more than one."""
    name = host.decode("latin-1").lower()
    name = name if name.endswith("]") else name.rpartition(":")[0] or name
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False

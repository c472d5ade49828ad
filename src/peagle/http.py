"""HTTP to model servers, by httpx: where a server is, connections to it, retries, and its errors.

httpx is imported with the first client, because most commands never need one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import json
import logging
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from peagle.errors import BackendError, ConfigError

ADDRESS_HINT = "write http://HOST:PORT"
FATAL = (401, 403, 404, 405)  # the same for every request
HEALTH_TIMEOUT = 5.0  # seconds

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, and how patient we are with it."""

    url: str  # with or without /v1
    model: str = ""
    api_key: str | None = None
    retries: int = 5
    timeout: float = 600.0  # seconds without a byte
    first_wait: float = 1.0  # seconds before the first retry; doubled each time
    shows_token_ids: bool = False  # it takes vLLM's own keys
    through_proxy: bool = False  # by the environment's proxy, where it is not on this machine

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            _ = parts.port  # raises ValueError where it is out of range
        except ValueError:
            is_address = False
        if not is_address:
            raise ConfigError(f"endpoint {self.url!r} is not an address", hint=ADDRESS_HINT)

    @property
    def base_url(self) -> str:
        """The address without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def is_local(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


class ServerError(Exception):
    """A request without an answer. `is_temporary`: the same request may succeed later."""

    is_temporary = True


class LostError(ServerError):
    """The server could not be reached, or the answer broke off."""


class RefusedError(ServerError):
    """The server answered with an error; a fatal one will come for every request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.is_about_key = status in (401, 403)
        self.is_fatal = status in FATAL
        self.is_temporary = status == 429 or status >= 500
        self.is_wrong_request = 400 <= status < 500 and not (self.is_fatal or self.is_temporary)


class HttpClient:
    """Connections to one endpoint, kept between requests. Callable from many threads.

    Each request raises RefusedError or LostError where no answer comes.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import httpx

        headers = {"Accept-Encoding": "identity"}  # a compressed stream comes in larger pieces
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        try:
            self._client = httpx.Client(
                base_url=endpoint.base_url,
                headers=headers,
                timeout=endpoint.timeout,
                limits=httpx.Limits(keepalive_expiry=None),  # as many as there are requests
                trust_env=endpoint.through_proxy and not endpoint.is_local,
                verify=_tls(),
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            message = f"endpoint {endpoint.url!r} or its key cannot be used: {error}"
            raise ConfigError(message, hint=ADDRESS_HINT) from None

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> bytes:
        with self._response("GET", path, None) as pieces:
            return b"".join(pieces)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        with self._response("POST", path, body) as pieces:
            return b"".join(pieces)

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        with self._response("POST", path, body) as pieces:
            yield from server_sent(pieces)

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[Iterator[bytes]]:
        """The content of an answer as it comes."""
        import httpx

        try:
            response = self._send(method, path, body)
        except httpx.HTTPError as error:
            raise LostError(str(error) or type(error).__name__) from None
        try:
            if not response.is_success:
                raise RefusedError(response.status_code, error_message(response.read()))
            yield response.iter_bytes()
        except httpx.RemoteProtocolError:
            raise LostError("the answer broke off") from None
        except httpx.HTTPError as error:
            raise LostError(str(error) or type(error).__name__) from None
        finally:
            response.close()

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        """-> httpx.Response, of which the head has come."""
        import httpx

        request = self._client.build_request(method, path, json=body)
        try:
            return self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            # The server may have closed a kept connection while it was idle: try another.
            return self._client.send(request, stream=True)


def server_sent(pieces: Iterator[bytes]) -> Generator[dict[str, Any], None, None]:
    """The documents of a server-sent stream. One without its end mark broke off."""
    ended = False
    for line in _lines(pieces):  # to the very end, or the connection is not kept
        data = line[5:].strip() if line.startswith(b"data:") else b""
        ended = ended or data == b"[DONE]"
        if data and not ended:
            yield _document(data)
    if not ended:
        raise LostError("the answer broke off")


def retrying(
    ask: Callable[[], _Answer],
    endpoint: Endpoint,
    after_failure: Callable[[], None] = lambda: None,
) -> _Answer:
    """`ask()`, and again after longer and longer pauses where the server is busy or away."""
    for attempt in range(endpoint.retries):
        try:
            return ask()
        except ServerError as error:
            if not error.is_temporary:
                raise
            _say_once(endpoint.base_url, str(error))
        after_failure()
        time.sleep(endpoint.first_wait * 2**attempt)
    return ask()


@functools.cache  # once for all requests that wait for this server
def _say_once(url: str, reason: str) -> None:
    logger.warning("%s: %s; trying again", url, reason)


def check_reachable(endpoint: Endpoint) -> None:
    """Raises where nobody answers, or our key is refused; any other answer will do."""
    try:
        with HttpClient(replace(endpoint, timeout=HEALTH_TIMEOUT)) as http:
            http.get("/v1/models")
    except ServerError as error:
        if isinstance(error, RefusedError) and not error.is_about_key:
            return
        raise BackendError(
            f"{endpoint.url} gives no answer: {error}", hint="check the address and the key"
        ) from None


def is_healthy(url: str) -> bool:
    """Whether a GET succeeds. Asked without a proxy: the server is on this machine, or on one that
    we named ourselves."""
    import httpx

    try:
        answer = httpx.get(url, timeout=HEALTH_TIMEOUT, trust_env=False, verify=_tls())
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return bool(answer.status_code == 200)


@functools.cache
def _tls() -> ssl.SSLContext:
    """The system's certificates and SSL_CERT_FILE, as everywhere in Python; httpx has its own."""
    return ssl.create_default_context()


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """httpx' own iter_lines also ends a line at the separators that Unicode knows, and those may
    stand inside a JSON text."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest


def _document(data: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(data)
    except ValueError:
        raise LostError(f"the stream holds no JSON: {data[:80]!r}") from None
    if "error" in document:
        raise RefusedError(500, error_message(data))
    return document


def error_message(content: bytes) -> str:
    """The `message` of an OpenAI error, or the start of whatever came."""
    try:
        document = json.loads(content)
        return str(document.get("error", document).get("message", document))[:200]
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace")


def cannot_listen(host: str | None, port: int, error: OSError) -> ConfigError:
    """Why an address is not ours to answer at: the port is taken, or the host is not this one."""
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    hint = "stop what uses the port, or choose another with --port" if is_port else "check --host"
    return ConfigError(f"cannot listen on {host or '*'}:{port}: {error.strerror}", hint=hint)

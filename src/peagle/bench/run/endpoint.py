"""An OpenAI-compatible server: where it is, what it serves, and one streamed answer.

Needs the standard library alone, so the client costs little and works in any environment.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from peagle.errors import BackendError, ConfigError

HINT = "is the server up? the same command goes on where this ended"
KNOWS_TOKEN_IDS = ("vllm", "peagle")  # `owned_by` of servers that take vLLM's own keys
FATAL = (401, 403, 404, 405)  # the same for every request


class RefusedError(Exception):
    """The server answered with an error; `fatal` ones will come for every request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.fatal = status in FATAL
        self.wrong_request = 400 <= status < 500 and status != 429 and not self.fatal


@dataclass(frozen=True)
class Endpoint:
    url: str  # with or without /v1
    model: str = ""
    api_key: str | None = None
    timeout: float = 600.0  # seconds without a byte
    shows_token_ids: bool = False

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(
                f"backend {self.url!r} is not an address", hint="write http://HOST:PORT"
            )

    @property
    def prefix(self) -> str:
        """The path before /v1."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.hostname or "", parts.port, timeout=self.timeout)

    def get(self, path: str) -> bytes:
        """Raises RefusedError, OSError or HTTPException."""
        connection = self.connect()
        try:
            connection.request("GET", self.prefix + path, headers=self.headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise RefusedError(response.status, _message(content))
        return content


def find_model(endpoint: Endpoint, wanted: str) -> Endpoint:
    """The endpoint with the name of its model: `wanted` if it serves that, or its only one."""
    try:
        listed = json.loads(endpoint.get("/v1/models"))["data"]
        owners = {str(entry["id"]): entry.get("owned_by") for entry in listed}
    except (RefusedError, OSError, http.client.HTTPException) as error:
        raise BackendError(f"{endpoint.url} gives no answer: {reason(error)}", hint=HINT) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BackendError(
            f"{endpoint.url} is not an OpenAI-compatible server: /v1/models lists no model",
            hint="give the address without a path, or with /v1",
        ) from None
    name = wanted if wanted in owners else next(iter(owners), "")
    if not owners or (name != wanted and len(owners) > 1):
        raise BackendError(
            f"{endpoint.url} does not serve {wanted!r}",
            hint=f"give MODEL as the server names it: {', '.join(owners) or 'it serves none'}",
        )
    return Endpoint(
        endpoint.url,
        name,
        endpoint.api_key,
        endpoint.timeout,
        shows_token_ids=owners[name] in KNOWS_TOKEN_IDS,
    )


def events(
    connection: http.client.HTTPConnection, endpoint: Endpoint, path: str, body: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The documents of one server-sent stream. Raises RefusedError, OSError, HTTPException;
    a stream that ends without its end mark is an http.client.IncompleteRead."""
    connection.request("POST", endpoint.prefix + path, json.dumps(body), endpoint.headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RefusedError(response.status, _message(response.read()))
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            response.read()
            return
        document = json.loads(data)
        if "error" in document:
            raise RefusedError(500, _message(data))
        yield document
    raise http.client.IncompleteRead(b"")


def reason(error: BaseException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the answer broke off"
    return str(error) or type(error).__name__


def _message(content: bytes) -> str:
    """The `message` of an OpenAI error, or the start of whatever came."""
    try:
        document = json.loads(content)
        return str(document.get("error", document).get("message", document))[:200]
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace")

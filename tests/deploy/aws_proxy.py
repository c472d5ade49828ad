"""AWS as the tests see it: moto, behind a proxy that does otherwise where a test says so.

moto's endpoints are in service at once, never fail, throttle nobody and answer no model's
requests: that is what the proxy adds.
"""

from __future__ import annotations

import http.client
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Change = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Refusal:
    """What AWS would answer instead."""

    code: str
    message: str = "no"
    status: int = 400
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """The request is done, and the connection ends before its answer."""


@dataclass(frozen=True)
class Gate:
    """Passes a request on, or not, and keeps its answer back: `reached` is set then."""

    reached: threading.Event = field(default_factory=threading.Event)
    passed_on: bool = True


@dataclass
class Behaviour:
    """By operation, what happens to the next requests, one each; then moto answers again."""

    rules: dict[str, list[Refusal | Gate | Lost | Change | None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # `sagemaker:CreateModel`
    bodies: list[bytes] = field(default_factory=list)  # of those
    parts: list[bytes] = field(default_factory=list)  # of a streamed answer
    breaks_off: bool = False  # with an exception in the stream
    answer: bytes = b"{}"  # of a request that is not streamed
    invocations: list[dict[str, Any]] = field(default_factory=list)

    def called(self, operation: str) -> int:
        return sum(call.endswith(f":{operation}") for call in self.calls)


@contextmanager
def serving(behaviour: Behaviour, moto: str) -> Iterator[str]:
    """-> the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self._body()
            operation = _operation(self.headers["X-Amz-Target"], self.path)
            behaviour.calls.append(f"{_service(self.headers['Authorization'])}:{operation}")
            behaviour.bodies.append(body)
            rules = behaviour.rules.get(operation)
            rule = rules.pop(0) if rules else None
            if isinstance(rule, Refusal):
                self._refuse(rule)
            elif operation.startswith("InvokeEndpoint"):
                self._invoke(body)
            elif isinstance(rule, Lost):
                self._pass_on(body)
                self.close_connection = True
            elif isinstance(rule, Gate):
                if rule.passed_on:
                    self._pass_on(body)
                rule.reached.set()
                threading.Event().wait(60)  # whoever asked is killed meanwhile
            else:
                status, headers, content = self._pass_on(body)
                if rule is not None:
                    content = json.dumps(rule(json.loads(content))).encode()
                self._send(status, headers, content)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            target = http.client.HTTPConnection(urlsplit(moto).netloc)
            left_out = ("transfer-encoding", "content-length", "expect")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in left_out}
            target.request(self.command, self.path, body, headers)
            answer = target.getresponse()
            content = answer.read()
            target.close()
            kept = ("content-type", "etag", "x-amzn-errortype", "smithy-protocol")
            return (
                answer.status,
                {k: v for k, v in answer.getheaders() if k.lower() in kept},
                content,
            )

        def _refuse(self, refusal: Refusal) -> None:
            content = {"__type": refusal.code, "message": refusal.message, **refusal.more}
            headers = {"x-amzn-errortype": refusal.code, "Content-Type": "application/json"}
            self._send(refusal.status, headers, json.dumps(content).encode())

        def _invoke(self, body: bytes) -> None:
            asked = {"path": self.path, "signature": self.headers["Authorization"]}
            behaviour.invocations.append({**asked, **json.loads(body)})
            if not self.path.endswith("stream"):
                self._send(200, {"Content-Type": "application/json"}, behaviour.answer)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.amazon.eventstream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in behaviour.parts:
                self._chunk(event({":message-type": "event", ":event-type": "PayloadPart"}, part))
            if behaviour.breaks_off:
                kinds = {":message-type": "exception", ":exception-type": "ModelStreamError"}
                said = {"Message": "the connection was reset", "ErrorCode": "StreamBroken"}
                self._chunk(event(kinds, json.dumps(said).encode()))
            self.wfile.write(b"0\r\n\r\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # whoever asked was killed

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.socket.close()  # without waiting for those who are kept back


def event(headers: dict[str, str], payload: bytes) -> bytes:
    """A message of AWS' event stream."""
    packed = b"".join(
        bytes([len(name)])
        + name.encode()
        + b"\x07"
        + struct.pack(">H", len(value))
        + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack(">II", len(packed) + len(payload) + 16, len(packed))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + packed + payload
    return message + struct.pack(">I", zlib.crc32(message))


def _operation(target: str | None, path: str) -> str:
    if target is not None:
        return target.rpartition(".")[2]
    if "/operation/" in path:  # CloudWatch
        return path.rpartition("/")[2]
    if path.endswith("/invocations"):
        return "InvokeEndpoint"
    return "InvokeEndpointWithResponseStream" if path.endswith("response-stream") else path


def _service(authorization: str | None) -> str:
    """`... Credential=KEY/20260101/us-east-1/sagemaker/aws4_request, ...`"""
    return (authorization or "/////").split("/")[3]

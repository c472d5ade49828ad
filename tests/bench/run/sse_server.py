"""A small OpenAI-compatible server that streams, and misbehaves as told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does; a test may change it while it runs."""

    owner: str = "vllm"
    models: tuple[str, ...] = ("m",)
    chunks: tuple[tuple[int, ...], ...] = ((1,), (2, 3), (4,))
    token_ids: bool = True
    usage: bool = True
    status: int = 200
    dies_after: int | None = None  # chunks, then the connection breaks
    dead: bool = False  # every connection breaks
    pause: float = 0.0  # seconds before each chunk
    metrics: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            behaviour.num_connections += 1

        def do_GET(self) -> None:
            if behaviour.dead:
                self.close_connection = True
                return
            if self.path == "/metrics":
                self._send(200 if behaviour.metrics else 404, behaviour.metrics.encode())
                return
            listed = [{"id": name, "owned_by": behaviour.owner} for name in behaviour.models]
            self._send(200, json.dumps({"data": listed}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour.requests.append({"path": self.path, **body})
            if behaviour.dead:
                self.close_connection = True
                return
            if behaviour.status != 200:
                error = {"error": {"message": "no such thing"}}
                self._send(behaviour.status, json.dumps(error).encode())
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._stream("messages" in body)

        def _stream(self, chat: bool) -> None:
            count = 0
            for number, ids in enumerate(behaviour.chunks):
                if number == behaviour.dies_after:
                    self.close_connection = True
                    return
                time.sleep(behaviour.pause)
                count += len(ids)
                text = "".join(f"<{token}>" for token in ids)
                choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
                if behaviour.token_ids:
                    choice["token_ids"] = list(ids)
                self._event({"choices": [choice]})
            if behaviour.usage:
                self._event({"choices": [], "usage": {"completion_tokens": count}})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, document: Any) -> None:
            self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
            self.wfile.flush()

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

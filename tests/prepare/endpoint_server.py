"""A small completions server that misbehaves as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status and JSON document
Behaviour = Callable[[dict[str, Any]], Reply]


def completion(token_ids: list[int], finish_reason: str = "stop") -> Reply:
    choice = {"text": "", "token_ids": token_ids, "finish_reason": finish_reason}
    return 200, {"choices": [choice]}


@contextmanager
def serving(
    behaviour: Behaviour, models: Reply = (501, {})
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """-> the address, and the posted requests as they come. `models`: what a GET brings."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"path": self.path, "key": self.headers["Authorization"], **body})
            self._reply(*behaviour(body))

        def do_GET(self) -> None:
            self._reply(*models)

        def _reply(self, status: int, document: Any) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

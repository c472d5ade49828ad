"""A stand-in for vLLM with hidden-state extraction: the tiny target behind the same protocol."""

from __future__ import annotations

import fcntl
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.data.packing import lay_out
from peagle.models.target import TargetModel
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.train.features.vllm_client import folder_name


@dataclass
class FakeVllm:
    target: TargetModel
    layer_ids: tuple[int, ...]
    root: Path
    max_model_len: int = 512
    changes: dict[str, Any] = field(default_factory=dict)  # what it says instead of the truth
    open: threading.Event = field(default_factory=threading.Event)  # answers wait for it
    prompts: list[list[int]] = field(default_factory=list)
    status: int = 200
    url: str = ""

    @property
    def folder(self) -> Path:
        return self.root / folder_name(self.layer_ids)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(body["prompt"])
        assert self.open.wait(10)
        tokens = torch.tensor(body["prompt"])
        row = lay_out([tokens], [torch.ones(len(tokens))], [0], len(tokens))
        features = OnlineFeatures(self.target, self.layer_ids)(row)
        states = features.aux_hidden_states.unflatten(-1, (len(self.layer_ids), -1))
        path = self.folder / f"{uuid.uuid4().hex}.safetensors"
        self._write(path, {"hidden_states": states.contiguous(), "token_ids": tokens})
        token = int(self.target.logits(features.states[-1:]).argmax())
        return {
            "choices": [{"token_ids": [token]}],
            "kv_transfer_params": {"hidden_states_path": str(path)},
        } | self.changes

    def _write(self, path: Path, tensors: dict[str, Tensor]) -> None:
        """After the answer, as vLLM does: the lock is held until the file is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            save_file(tensors, path)
            lock.close()

        threading.Timer(0.02, write).start()


@contextmanager
def serving_states(fake: FakeVllm, *, is_open: bool = True) -> Iterator[FakeVllm]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            card = {"id": "tiny", "max_model_len": fake.max_model_len}
            self._reply(200, {"data": [card]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if fake.status != 200:
                return self._reply(fake.status, {"error": {"message": "no room"}})
            return self._reply(200, fake.complete(body))

        def _reply(self, status: int, document: dict[str, Any]) -> None:
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
    fake.url = f"http://127.0.0.1:{server.server_port}"
    if is_open:
        fake.open.set()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

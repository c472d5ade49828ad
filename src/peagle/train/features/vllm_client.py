"""Asks a vLLM server for the hidden states of documents.

vLLM's `extract_hidden_states` keeps the residual stream after chosen layers in its cache; its
hidden-states connector writes it to a file when a request ends, and the answer names the file:

    hidden_states [n, layers, H]   in rising order of layer ids, whatever order was asked for
    token_ids [n]                  compared with ours: states of others would train silently

The lock file beside it is held until the file is whole. The layers stand in the name of the
folder, because the file does not tell them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import DataError
from peagle.http import Endpoint, HttpClient, LostError, ServerError, retrying

NO_STATES_HINT = "start vLLM with what `peagle train RECIPE --vllm-command` prints"
LOCK_PAUSE = 0.01  # seconds


class DocumentStates(NamedTuple):
    hidden: Tensor  # [n, layers, H]
    next_token: int  # the target's greedy choice after the document


class ServedModel(NamedTuple):
    name: str
    max_model_len: int


class StatesClient:
    """`still_alive` raises where it is known why nobody answers. Callable from many threads."""

    def __init__(
        self,
        endpoint: Endpoint,
        layer_ids: tuple[int, ...],
        folder: Path | None = None,  # the server's folder as we see it; None: as it says
        still_alive: Callable[[], None] = lambda: None,
    ) -> None:
        assert list(layer_ids) == sorted(set(layer_ids)), layer_ids
        self.endpoint, self.layer_ids, self.folder = endpoint, layer_ids, folder
        self.still_alive = still_alive
        self._http = HttpClient(endpoint)

    def __call__(self, token_ids: Tensor) -> DocumentStates:
        answer = self._ask(token_ids.tolist())
        path = self._path(answer)
        try:
            tensors = read_states(path, self.endpoint.timeout)
        finally:
            remove_states(path)
        hidden, stored = tensors["hidden_states"], tensors["token_ids"]
        if stored.tolist() != token_ids.tolist():
            raise DataError(f"{path} holds states of other tokens", hint=NO_STATES_HINT)
        if hidden.shape[:2] != (len(token_ids), len(self.layer_ids)):
            raise DataError(
                f"{path} holds states of shape {list(hidden.shape)}, expected "
                f"{len(token_ids)} tokens and {len(self.layer_ids)} layers",
                hint=NO_STATES_HINT,
            )
        return DocumentStates(hidden, answer["choices"][0]["token_ids"][0])

    def _ask(self, token_ids: list[int]) -> dict[str, Any]:
        body = {
            "model": self.endpoint.model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "repetition_penalty": 1.0,  # a model's generation_config.json may set another
            "return_token_ids": True,
        }
        try:
            return retrying(lambda: self._post(body), self.endpoint, self.still_alive)
        except ServerError as error:
            if not error.is_temporary:
                raise self._refused(len(token_ids), error) from None
            self.still_alive()
            raise DataError(
                f"{self.endpoint.url} returned no hidden states: {error}",
                hint="see the server's log; `peagle train --resume` goes on from the last "
                "checkpoint",
            ) from None

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        content = self._http.post("/v1/completions", body)
        try:
            document: dict[str, Any] = json.loads(content)
        except ValueError as error:
            raise LostError(f"the answer is not JSON: {error}") from None
        return document

    def _refused(self, num_tokens: int, reason: ServerError) -> DataError:
        return DataError(
            f"vLLM refused a document of {num_tokens} tokens: {reason}",
            hint="its max_model_len must be larger than the longest document",
        )

    def _path(self, answer: dict[str, Any]) -> Path:
        """Where the states are. Deleted after reading, so nothing but states may be named."""
        named = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(named, str) or not named.endswith(".safetensors"):
            raise DataError(f"{self.endpoint.url} returns no hidden states", hint=NO_STATES_HINT)
        path = Path(named)
        if path.parent.name != folder_name(self.layer_ids):
            raise DataError(
                f"the server writes to {path.parent.name!r}, "
                f"but the head needs {folder_name(self.layer_ids)!r}",
                hint=NO_STATES_HINT,
            )
        return path if self.folder is None else self.folder / path.name


def served_model(url: str, timeout: float = 30.0) -> ServedModel:
    try:
        with HttpClient(Endpoint(url, timeout=timeout)) as http:
            card = json.loads(http.get("/v1/models"))["data"][0]
        return ServedModel(card["id"], card["max_model_len"])
    except (ServerError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"no vLLM server answers at {url}: {error}", hint=NO_STATES_HINT) from None


def folder_name(layer_ids: tuple[int, ...]) -> str:
    return "layers-" + "-".join(map(str, layer_ids))


def read_states(path: Path, timeout: float) -> dict[str, Tensor]:
    """Waits until the file is whole."""
    try:
        _wait_for_writer(path.with_name(path.name + ".lock"), timeout)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"vLLM's hidden states at {path} cannot be read: {error}",
            hint="this process and vLLM must share a file system with enough free space; "
            "vllm.folder is its path here, and the server's log may say more",
        ) from None


def remove_states(path: Path) -> None:
    for name in (path.name, path.name + ".lock"):
        with contextlib.suppress(OSError):
            path.with_name(name).unlink()


def _wait_for_writer(lock: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with lock.open() as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not written within {timeout:.0f} s") from None
                time.sleep(LOCK_PAUSE)

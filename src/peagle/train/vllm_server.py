"""A vLLM server of our own, in a process group of its own, that ends when we do."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from peagle.backends.vllm.log import last_words
from peagle.backends.vllm.server import is_healthy
from peagle.errors import ModelError
from peagle.train import keeper

CPU_CONNECTOR = Path(__file__).parent.parent / "backends" / "vllm_connector"
START_PAUSE = 0.5  # seconds
END_TIMEOUT = keeper.GRACE + 10.0


@dataclass(frozen=True)
class ServerPlan:
    """What vLLM is told. `command` ends where the model's folder follows."""

    model: Path
    layer_ids: tuple[int, ...]
    root: Path  # the states lie in a subfolder named after the layers
    max_model_len: int
    max_positions: int  # the target's
    dtype: str
    num_requests: int
    on_gpu: bool
    command: str = "vllm serve"
    args: tuple[str, ...] = ()
    devices: str | None = None

    @property
    def folder(self) -> Path:
        return self.root / folder_name(self.layer_ids)

    def arguments(self) -> list[str]:
        """Ours first, so that the user's later ones win. Cached prefixes would have no states."""
        return [
            *shlex.split(self.command),
            str(self.model),
            f"--dtype={self.dtype}",
            f"--max-model-len={self.max_model_len}",
            f"--max-num-seqs={self.num_requests}",
            "--no-enable-prefix-caching",
            f"--speculative-config={json.dumps(self._speculative_config())}",
            f"--kv-transfer-config={json.dumps(self._transfer_config())}",
            *self.args,
        ]

    def variables(self) -> dict[str, str]:
        """Environment beyond the present one."""
        found = {}
        if self.devices is not None:
            found["CUDA_VISIBLE_DEVICES"] = self.devices
        if not self.on_gpu:
            paths = [str(CPU_CONNECTOR), os.environ.get("PYTHONPATH", "")]
            found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if self.max_model_len > self.max_positions:  # by the one token that is never computed
            found["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        return found

    def shell_command(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables().items()]
        return " ".join([*variables, shlex.join(self.arguments())])

    def _speculative_config(self) -> dict[str, object]:
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.layer_ids)}
        return {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": layers},
        }

    def _transfer_config(self) -> dict[str, object]:
        config: dict[str, object] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }
        if not self.on_gpu:  # vLLM's own needs CUDA
            config["kv_connector"] = "CpuHiddenStatesConnector"
            config["kv_connector_module_path"] = "peagle_vllm_connector"
        return config


class VllmServer:
    """`plan.root` is ours: it is deleted when the server has ended."""

    def __init__(self, plan: ServerPlan, log: Path, *, timeout: float) -> None:
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, keeper.__file__, str(plan.root), *plan.arguments()]
        command += ["--host=127.0.0.1", f"--port={port}"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._keeper = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **plan.variables()},
                start_new_session=True,  # Ctrl-C is for us: we end it in our own time
            )
        self.close = weakref.finalize(self, end, self._keeper)
        self._wait(timeout)

    def still_alive(self) -> None:
        if self._keeper.poll() is not None:
            raise ModelError(
                f"vLLM ended with {self._keeper.returncode}: {last_words(self._log_lines())}",
                hint=f"its log is {self.log}",
            )

    def _log_lines(self) -> list[str]:
        return self.log.read_text("utf-8", "replace").splitlines()

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not is_healthy(f"{self.url}/health"):
            self.still_alive()
            if time.monotonic() > deadline:
                self.close()
                raise ModelError(
                    f"vLLM was not ready after {timeout / 60:.0f} minutes",
                    hint=f"its log is {self.log}; vllm.start_minutes allows more",
                )
            time.sleep(START_PAUSE)


def folder_name(layer_ids: tuple[int, ...]) -> str:
    return "layers-" + "-".join(map(str, layer_ids))


def end(process: subprocess.Popen[bytes]) -> None:
    """Closing its input tells the keeper to end the server."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

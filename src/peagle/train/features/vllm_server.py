"""From a recipe's `vllm` section to features: a server that is there, or one that we start.

Our own server runs in a process group of its own and ends when we do.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from peagle.backends.vllm.install import find_vllm
from peagle.backends.vllm.log import last_words
from peagle.checkpoints.references import resolve_model
from peagle.errors import BackendError, ConfigError, DataError, ModelError
from peagle.http import Endpoint, is_healthy
from peagle.models.config import DecoderConfig
from peagle.models.target import TargetModel
from peagle.processes import GuardedProcess
from peagle.train.features.vllm_client import StatesClient, folder_name, served_model
from peagle.train.features.vllm_features import VllmFeatures
from peagle.train.inputs import read_inputs
from peagle.train.recipe import Recipe, VllmSection

CPU_CONNECTOR = Path(__file__).parents[2] / "backends" / "vllm_connector"
START_PAUSE = 0.5  # seconds
MEMORY = Path("/dev/shm")
USABLE_SHARE = 0.5  # of a folder's free space


@dataclass(frozen=True)
class RequiredStates:
    """What the states must be of."""

    model: str
    sizes: DecoderConfig
    aux_hidden_state_layers: tuple[int, ...]
    longest: int  # document, in tokens
    dtype: torch.dtype

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The aux layers and the last, in the order in which vLLM stores them."""
        return tuple(sorted({*self.aux_hidden_state_layers, self.sizes.num_hidden_layers}))

    @property
    def document_bytes(self) -> int:
        """Size of the longest document's states on disk."""
        tokens = self.longest * len(self.layer_ids) * self.sizes.hidden_size
        return tokens * self.dtype.itemsize


def open_features(
    section: VllmSection,
    need: RequiredStates,
    target: TargetModel,
    log: Path,
    *,
    world_size: int = 1,
) -> VllmFeatures:
    if section.endpoint is not None:
        client = connect(section, need)
        return VllmFeatures(
            client, target, need.aux_hidden_state_layers, num_requests=section.requests
        )
    if world_size > 1:
        raise ConfigError(
            "several training processes must share one vLLM server",
            hint="start what `peagle train RECIPE --vllm-command` prints, and set vllm.endpoint",
        )
    root, num_requests = make_room(section, need)
    plan = plan_server(section, need, root, num_requests)
    server = VllmServer(plan, log, timeout=60 * section.start_minutes)
    endpoint = Endpoint(server.url, served_model(server.url).name)
    client = StatesClient(endpoint, need.layer_ids, still_alive=server.still_alive)
    return VllmFeatures(client, target, need.aux_hidden_state_layers, num_requests=num_requests)


def connect(section: VllmSection, need: RequiredStates) -> StatesClient:
    assert section.endpoint is not None
    model = served_model(section.endpoint)
    if model.max_model_len <= need.longest:  # one token is generated
        raise DataError(
            f"the longest document has {need.longest} tokens, but the server's max_model_len "
            f"is {model.max_model_len}",
            hint=f"start it with --max-model-len {need.longest + 1}",
        )
    folder = None
    if section.folder is not None:
        folder = Path(section.folder) / folder_name(need.layer_ids)
    return StatesClient(Endpoint(section.endpoint, model.name), need.layer_ids, folder)


def plan_server(
    section: VllmSection, need: RequiredStates, root: Path, num_requests: int
) -> ServerPlan:
    return ServerPlan(
        model=resolve_model(need.model),
        layer_ids=need.layer_ids,
        root=root,
        max_model_len=need.longest + 1,
        max_positions=need.sizes.max_position_embeddings,
        dtype=str(need.dtype).removeprefix("torch."),
        num_requests=num_requests,
        on_gpu=runs_on_gpu(section),
        command=section.command or installed_command(),
        args=section.args,
        devices=section.devices,
    )


def runs_on_gpu(section: VllmSection) -> bool:
    return torch.cuda.is_available() if section.device == "auto" else section.device == "cuda"


def make_room(section: VllmSection, need: RequiredStates) -> tuple[Path, int]:
    """-> a new folder, and how many requests it has room for.

    Files are deleted as soon as they are read, so the documents in flight bound what lies there.
    """
    given = [section.folder] if section.folder else [str(MEMORY), tempfile.gettempdir()]
    room = {name: shutil.disk_usage(name).free for name in given if Path(name).is_dir()}
    if not room:
        raise ConfigError(f"vllm.folder={section.folder} is not a folder")
    fitting = {n: int(free * USABLE_SHARE) // need.document_bytes for n, free in room.items()}
    # The first that takes all requests, else the one that takes most.
    name = max(fitting, key=lambda n: min(fitting[n], section.requests))
    if fitting[name] < 1:
        raise DataError(
            f"the states of one document take {need.document_bytes / 2**30:.1f} GiB, more than "
            f"half of what is free in {name}",
            hint="set vllm.folder to a folder with more room",
        )
    folder = Path(tempfile.mkdtemp(prefix="peagle-states-", dir=name))
    return folder, min(fitting[name], section.requests)


def installed_command() -> str:
    """How the vLLM on this machine is started; vLLM's own word where there is none."""
    try:
        return shlex.join(find_vllm().program)
    except BackendError:
        return "vllm serve"


def shell_command(recipe: Recipe) -> str:
    """What to start where `vllm.endpoint` will be; nothing is loaded."""
    section, inputs = recipe.vllm, read_inputs(recipe)
    aux_hidden_states, longest = (
        inputs.head.aux_hidden_state_layer_ids,
        int(inputs.dataset.lengths.max()),
    )
    dtype = torch.bfloat16 if runs_on_gpu(section) else torch.float32
    need = RequiredStates(recipe.target.model, inputs.sizes, aux_hidden_states, longest, dtype)
    root = Path(section.folder or MEMORY / "peagle-states")
    return plan_server(section, need, root, section.requests).shell_command()


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
        words = [*plan.arguments(), "--host=127.0.0.1", f"--port={port}"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self._process = start(words, output, plan)
        self.close = weakref.finalize(self, self._process.close)
        self._wait(timeout)

    def still_alive(self) -> None:
        code = self._process.exit_code
        if code is not None:
            raise ModelError(
                f"vLLM exited with code {code}: {last_words(self._log_lines())}",
                hint=f"see its log: {self.log}",
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
                    hint=f"see its log: {self.log}; vllm.start_minutes gives it more time",
                )
            time.sleep(START_PAUSE)


def start(words: list[str], output: IO[str], plan: ServerPlan) -> GuardedProcess:
    try:
        return GuardedProcess(words, output, variables=plan.variables(), folder=plan.root)
    except OSError as error:
        shutil.rmtree(plan.root, ignore_errors=True)
        raise ModelError(
            f"cannot start {words[0]}: {error.strerror}", hint="is vLLM installed, and on PATH?"
        ) from None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

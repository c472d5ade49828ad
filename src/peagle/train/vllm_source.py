"""From a recipe's `vllm` section to features: a server that is there, or one that we start."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from peagle.backends.vllm.install import find_vllm
from peagle.checkpoints.references import resolve_model
from peagle.errors import BackendError, ConfigError, DataError
from peagle.models.config import DecoderConfig
from peagle.models.target import TargetModel
from peagle.train.endpoint import Endpoint
from peagle.train.inputs import read_inputs
from peagle.train.recipe import Recipe, VllmSection
from peagle.train.vllm_client import StatesClient, served_model
from peagle.train.vllm_features import VllmFeatures
from peagle.train.vllm_server import ServerPlan, VllmServer, folder_name

MEMORY = Path("/dev/shm")
USABLE_SHARE = 0.5  # of a folder's free space


@dataclass(frozen=True)
class Need:
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
        """On disk, of the longest document."""
        tokens = self.longest * len(self.layer_ids) * self.sizes.hidden_size
        return tokens * self.dtype.itemsize


def open_features(
    section: VllmSection, need: Need, target: TargetModel, log: Path, *, world_size: int = 1
) -> VllmFeatures:
    if section.endpoint is not None:
        client = connect(section, need)
        return VllmFeatures(
            client, target, need.aux_hidden_state_layers, num_requests=section.requests
        )
    if world_size > 1:
        raise ConfigError(
            "several training processes need one vLLM server between them",
            hint="start what `peagle train RECIPE --vllm-command` prints, and set vllm.endpoint",
        )
    root, num_requests = make_room(section, need)
    plan = plan_server(section, need, root, num_requests)
    server = VllmServer(plan, log, timeout=60 * section.start_minutes)
    endpoint = Endpoint(server.url, served_model(server.url).name)
    client = StatesClient(endpoint, need.layer_ids, still_alive=server.still_alive)
    return VllmFeatures(client, target, need.aux_hidden_state_layers, num_requests=num_requests)


def connect(section: VllmSection, need: Need) -> StatesClient:
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


def plan_server(section: VllmSection, need: Need, root: Path, num_requests: int) -> ServerPlan:
    on_gpu = torch.cuda.is_available() if section.device == "auto" else section.device == "cuda"
    return ServerPlan(
        model=resolve_model(need.model),
        layer_ids=need.layer_ids,
        root=root,
        max_model_len=need.longest + 1,
        max_positions=need.sizes.max_position_embeddings,
        dtype=str(need.dtype).removeprefix("torch."),
        num_requests=num_requests,
        on_gpu=on_gpu,
        command=section.command or installed_command(),
        args=section.args,
        devices=section.devices,
    )


def make_room(section: VllmSection, need: Need) -> tuple[Path, int]:
    """-> a new folder, and how many requests it has room for.

    Files are deleted as soon as they are read, so the documents in flight bound what lies there.
    """
    given = [section.folder] if section.folder else [str(MEMORY), tempfile.gettempdir()]
    room = {name: shutil.disk_usage(name).free for name in given if Path(name).is_dir()}
    if not room:
        raise ConfigError(f"vllm.folder={section.folder} is no folder")
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
    on_gpu = section.device == "cuda" or (section.device == "auto" and torch.cuda.is_available())
    dtype = torch.bfloat16 if on_gpu else torch.float32
    need = Need(recipe.target.model, inputs.sizes, aux_hidden_states, longest, dtype)
    root = Path(section.folder or MEMORY / "peagle-states")
    return plan_server(section, need, root, section.requests).shell_command()

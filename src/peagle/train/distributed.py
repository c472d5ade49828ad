"""Several processes under torchrun: each takes its own packed rows, gradients are summed.

The denominator counts the loss rows of all processes, so the result is that of one process
with all rows. Gradients are exchanged in the last backward pass of a step alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from peagle.models.eagle import EagleNetwork
from peagle.teacher_forcing.draft_model import DraftModel

Sharding = Literal["ddp", "fsdp2"]


def start_from_environment(device: torch.device) -> None:
    """Joins the group that torchrun describes; does nothing in a process of its own."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(value: float, device: torch.device) -> float:
    """The sum over all processes."""
    if world_size() == 1:
        return value
    cell = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(cell)
    return cell.item()


def add_up(counters: Tensor) -> Tensor:
    if world_size() > 1:
        dist.all_reduce(counters)
    return counters


def wrap(model: DraftModel, sharding: Sharding) -> nn.Module:
    """The module to call in a step; `model` itself where there is one process."""
    if world_size() == 1:
        return model
    if sharding == "fsdp2":
        for layer in model.network.layers:
            fully_shard(layer)
        # Never resharded after forward: the loss reads the output table after it.
        fully_shard(model, reshard_after_forward=False)
        return model
    return DistributedDataParallel(model)


@contextlib.contextmanager
def exchange(module: nn.Module, now: bool) -> Iterator[None]:
    """Backward passes inside exchange gradients only if `now`."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        yield
    elif isinstance(module, DistributedDataParallel) and not now:
        with module.no_sync():
            yield
    else:
        yield


def missing_passes(module: nn.Module, own: int, device: torch.device) -> int:
    """Passes that this process has fewer than another. FSDP2 gathers weights in every pass, so
    processes with unlike numbers of segments would wait for each other for ever."""
    if not isinstance(module, FSDPModule) or world_size() == 1:
        return 0
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most) - own


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; others as they are. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, example: Tensor) -> Tensor:
    """A whole tensor, sharded as the example is."""
    if not isinstance(example, DTensor):
        return tensor
    return distribute_tensor(tensor.to(example.device), example.device_mesh, example.placements)


def whole_network(network: EagleNetwork) -> EagleNetwork:
    """The network with its weights put together: itself, unless they are sharded."""
    if not any(isinstance(p, DTensor) for p in network.parameters()):
        return network
    gathered = EagleNetwork(network.config, network.shared).to(network.fc.weight.dtype)
    gathered.load_state_dict({name: whole(p) for name, p in network.state_dict().items()})
    gathered.target_ids = network.target_ids
    return gathered

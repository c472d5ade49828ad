"""Named tensors -> module parameters: each exactly once, nothing missing, nothing left over.

Checkpoints keep q, k, v and gate, up apart; our modules hold them fused. The names of the parts
and their sizes stand here alone, for loading and for saving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.errors import PeagleError
from peagle.models.layers import GatedMLP, SelfAttention

MAX_THREADS = 8  # that read: more do not help a disk
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class Part(NamedTuple):
    """A stored tensor's place: rows start .. start + length of a parameter; all of it if fused."""

    parameter: str
    start: int
    length: int


def parts_of(module: nn.Module) -> dict[str, Part]:
    """Stored name -> place, for every parameter of the module."""
    parts = {}
    tied = _tied_names(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in tied:
            continue
        owner, _, leaf = name.rpartition(".")
        block, _, projection = owner.rpartition(".")
        if projection in FUSED:
            start = 0
            sizes = _part_sizes(module.get_submodule(block))
            for part, size in zip(FUSED[projection], sizes, strict=True):
                parts[f"{block}.{part}.{leaf}"] = Part(name, start, size)
                start += size
        else:
            parts[name] = Part(name, 0, parameter.shape[0])
    return parts


def load_weights(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    error: type[PeagleError],
    source: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fills a module made on the meta device, in the layout that its parameters have there.
    `source` names the folder in errors."""
    parts = parts_of(module)
    parameters = {
        name: torch.empty_strided(p.shape, p.stride(), dtype=dtype, device=device)
        for name, p in module.named_parameters()
    }
    missing, copies = set(parts), []
    with ThreadPoolExecutor(min(torch.get_num_threads(), MAX_THREADS)) as pool:
        for name, tensor in tensors:
            part = parts.get(name)
            if part is None:
                hint = "is it for another model?"
                raise error(f"{source} has an unknown tensor {name}", hint=hint)
            if name not in missing:
                raise error(f"{source} has {name} twice")
            place = parameters[part.parameter].narrow(0, part.start, part.length)
            _check(tensor, place.shape, f"{source}: {name}", error)
            copies.append(pool.submit(_fill, place, tensor))
            missing.remove(name)
    for copy in copies:
        copy.result()  # raises what went wrong
    if missing:
        some = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise error(f"{source} lacks {len(missing)} of its tensors: {some}", hint="copy it again")
    _assign(module, parameters)


def _check(tensor: Tensor, shape: torch.Size, what: str, error: type[PeagleError]) -> None:
    if tensor.shape != shape:
        raise error(f"{what} has shape {list(tensor.shape)}, expected {list(shape)}")
    if not tensor.is_floating_point():
        raise error(f"{what} is {tensor.dtype}", hint="quantised weights do not load")


def _fill(place: Tensor, tensor: Tensor) -> None:
    """Copies; torch is quick to transpose from one whole matrix to another of its type alone."""
    if tensor.dim() != 2 or place.stride(-1) == 1:
        place.copy_(tensor)
        return
    columns, place = tensor.to(place.dtype).t(), place.t()
    place.copy_(columns if place.is_contiguous() else columns.contiguous())


def split_weights(module: nn.Module) -> dict[str, Tensor]:
    """The inverse: stored name -> tensor, contiguous and detached."""
    state: Mapping[str, Tensor] = dict(module.named_parameters())
    return {
        name: state[part.parameter].detach().narrow(0, part.start, part.length).contiguous()
        for name, part in parts_of(module).items()
    }


def _assign(module: nn.Module, parameters: dict[str, Tensor]) -> None:
    ties = dict(_ties(module))
    made = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()}
    for name in [*made, *ties]:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[ties.get(name, name)])


def _ties(module: nn.Module) -> list[tuple[str, str]]:
    """(second name, first name) of each parameter that is known by two names."""
    first: dict[int, str] = {}
    ties = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            ties.append((name, first[id(parameter)]))
        else:
            first[id(parameter)] = name
    return ties


def _tied_names(module: nn.Module) -> set[str]:
    return {name for name, _ in _ties(module)}


def _part_sizes(block: nn.Module) -> tuple[int, ...]:
    if isinstance(block, SelfAttention):
        q, kv = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        return q, kv, kv
    assert isinstance(block, GatedMLP)
    return (block.down_proj.in_features,) * 2

"""Named tensors -> module parameters: each exactly once, nothing missing, nothing left over.

Most checkpoints keep q, k, v and gate, up apart, and experts too; our modules hold them fused. The
names of the parts and their sizes stand here alone, for loading and for saving. A checkpoint that
holds a parameter fused, as ours, is read as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.errors import PeagleError
from peagle.models.experts import LowBitMatrices
from peagle.models.layers import GatedMLP, SelfAttention

MAX_THREADS = 8  # that read: more do not help a disk
MAX_WAITING = 16  # tensors that are read, rearranged or expanded, and not copied yet
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class Part(NamedTuple):
    """A stored tensor's place: rows start .. start + length of a parameter, or of one expert's."""

    parameter: str
    start: int
    length: int
    expert: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        matrix = parameter if self.expert is None else parameter[self.expert]
        return matrix.narrow(0, self.start, self.length)


def parts_of(module: nn.Module) -> dict[str, Part]:
    """Stored name -> place, for every parameter of the module."""
    parts: dict[str, Part] = {}
    tied = _tied_names(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in tied:
            continue
        owner, _, leaf = name.rpartition(".")
        block, _, projection = owner.rpartition(".")
        if isinstance(module.get_submodule(owner), LowBitMatrices):
            stored = {"values": "weight", "scales": "weight_scale_inv"}[leaf]
            parts |= _expert_parts(name, parameter, block, projection, stored)
        elif projection in FUSED:
            for part, start, size in _parts(module.get_submodule(block), projection):
                parts[f"{block}.{part}.{leaf}"] = Part(name, start, size)
        elif leaf in EXPERT_PARTS and parameter.dim() == 3:
            parts |= _expert_parts(name, parameter, owner, leaf, "weight")
        else:
            parts[name] = Part(name, 0, parameter.shape[0])
    return parts


def _expert_parts(
    name: str, parameter: Tensor, experts: str, projection: str, stored: str
) -> dict[str, Part]:
    pieces = EXPERT_PARTS[projection]
    size = parameter.shape[1] // len(pieces)
    return {
        f"{experts}.{expert}.{piece}.{stored}": Part(name, n * size, size, expert)
        for expert in range(len(parameter))
        for n, piece in enumerate(pieces)
    }


def load_weights(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    error: type[PeagleError],
    source: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Fills a module made on the meta device. `source` names the folder in errors. Low-bit matrices
    keep their own types."""
    parts = parts_of(module)
    pieces: dict[str, set[str]] = {}  # parameter -> the stored names that it is made of
    for name, part in parts.items():
        pieces.setdefault(part.parameter, set()).add(name)
    low_bit = _low_bit_names(module)
    parameters = {
        name: torch.empty(p.shape, dtype=p.dtype if name in low_bit else dtype, device=device)
        for name, p in module.named_parameters()
    }
    missing, copies = set(parts), deque[Future[Tensor]]()
    with ThreadPoolExecutor(min(torch.get_num_threads(), MAX_THREADS)) as pool:
        for name, tensor in tensors:
            if name in parts:
                filled, place = {name}, parts[name].of(parameters[parts[name].parameter])
            elif name in pieces:  # stored fused
                filled, place = pieces[name], parameters[name]
            else:
                hint = "is it for another model?"
                raise error(f"{source} has an unknown tensor {name}", hint=hint)
            if not filled <= missing:
                raise error(f"{source} has {name} twice")
            _check(tensor, place, f"{source}: {name}", error)
            copies.append(pool.submit(place.copy_, tensor))
            if len(copies) > MAX_WAITING:
                copies.popleft().result()
            missing -= filled
    for copy in copies:
        copy.result()  # raises what went wrong
    if missing:
        some = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
        raise error(f"{source} lacks {len(missing)} of its tensors: {some}", hint="copy it again")
    _assign(module, parameters)


def _low_bit_names(module: nn.Module) -> set[str]:
    return {
        f"{owner}.{leaf}"
        for owner, matrices in module.named_modules()
        if isinstance(matrices, LowBitMatrices)
        for leaf, _ in matrices.named_parameters()
    }


def _check(tensor: Tensor, place: Tensor, what: str, error: type[PeagleError]) -> None:
    if tensor.shape != place.shape:
        raise error(f"{what} has shape {list(tensor.shape)}, expected {list(place.shape)}")
    is_low_bit = place.dtype.itemsize == 1  # bits, not numbers that could be cast
    if tensor.dtype != place.dtype if is_low_bit else not tensor.is_floating_point():
        raise error(f"{what} is {tensor.dtype}", hint="quantised weights do not load")


def split_weights(module: nn.Module) -> dict[str, Tensor]:
    """The inverse: stored name -> tensor, contiguous and detached."""
    state: Mapping[str, Tensor] = dict(module.named_parameters())
    return {
        name: part.of(state[part.parameter].detach()).contiguous()
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


def _parts(block: nn.Module, projection: str) -> list[tuple[str, int, int]]:
    """Name, first row and number of rows of what a fused projection is made of."""
    if isinstance(block, SelfAttention):
        sizes = [heads * block.head_dim for heads in block.parts]
    else:
        assert isinstance(block, GatedMLP)
        sizes = [block.down_proj.in_features] * 2
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return list(zip(FUSED[projection], starts, sizes, strict=False))  # values may be the keys

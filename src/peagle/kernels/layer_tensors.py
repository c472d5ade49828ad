"""The parameters of a decoder layer as tensors: what the CPU's and the GPU's kernels are given."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from peagle.kernels.cpu.linear import PackedWeight


class Projection(NamedTuple):
    weight: Tensor  # [O, I]; the panels of a packed one
    bias: Tensor | None  # [O]
    scales: Tensor | None = None  # [O, 1] where the weight is in FP8
    packed: PackedWeight | None = None


class LayerTensors(NamedTuple):
    """One layer's parameters and what else decides its output."""

    input_norm: Tensor | None  # None: the caller gives what attention reads
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Projection
    o: Projection
    gate_up: Projection
    down: Projection
    window: int | None
    eps: float

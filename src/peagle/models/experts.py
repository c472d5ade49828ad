"""Mixtures of experts: a router gives each row its best experts, a grouped product applies them.

Shapes: N rows, H hidden, E experts, k of them for each row, I intermediate. Nothing here asks the
device for a value on a GPU, so that it can be captured in a CUDA graph: rows are sorted by expert,
N * k of them whatever the router says. A row's result is summed in the order of its own experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import PackedWeight, Weight
from peagle.kernels.policy import gpu_takes
from peagle.kernels.reference import experts as reference
from peagle.kernels.reference.experts import LowBitForm, LowBitWeights
from peagle.models.config import DecoderConfig, ExpertsConfig
from peagle.models.layers import (
    Linear,
    at_least_float32,
    gated,
    linear,
    make_norm,
    norm_without_weight,
)

GROUPED_MM_CAPABILITY = (9, 0)  # of GPUs whose F.grouped_mm does not ask the host for the groups
# Of GPUs that Triton compiles the low-bit product for: bfloat16, and 8-bit floats.
LOW_BIT_CAPABILITY = {"mxfp4": (8, 0), "fp8": (8, 9)}


class Routing(NamedTuple):
    experts: Tensor  # [N, k]
    weights: Tensor  # [N, k]


class Router(nn.Module):
    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.kind, self.top_k = experts.router, experts.top_k
        self.proj = Linear(config.hidden_size, experts.num_experts, bias=experts.bias)

    def forward(self, x: Tensor) -> Routing:
        logits = self.proj(x)  # [N, E]
        if self.kind == "softmax_of_best":
            best, index = logits.topk(self.top_k, dim=-1)
            return Routing(index, best.softmax(-1))
        best, index = at_least_float32(logits).softmax(-1).topk(self.top_k, dim=-1)
        if self.kind == "normalised":
            best = best / best.sum(-1, keepdim=True)
        return Routing(index, best.to(logits.dtype))


class NormedRouter(Router):
    """Gemma-4's: norms its rows, and each expert's weight has a learned factor."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__(config, experts)
        self.eps, self.root = config.rms_norm_eps, config.hidden_size**-0.5
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(experts.num_experts))

    def forward(self, x: Tensor) -> Routing:
        normed = norm_without_weight(x, self.eps) * self.scale * self.root
        index, weights = super().forward(normed)
        return Routing(index, weights * self.per_expert_scale[index])


class LowBitMatrices(nn.Module):
    """Matrices [E, O, I] as a low-bit checkpoint stores them, in the place of a parameter. They
    keep their types whatever the model's dtype is."""

    def __init__(self, shape: tuple[int, int, int], form: LowBitForm) -> None:
        super().__init__()
        self.shape, self.form = shape, form
        (values, dtype), (scales, scale_dtype) = form.values_of(shape), form.scales_of(shape)
        self.values = nn.Parameter(torch.empty(values, dtype=dtype), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(scales, dtype=scale_dtype), requires_grad=False)

    @property
    def weights(self) -> LowBitWeights:
        return LowBitWeights(self.values, self.scales, self.form)

    def grouped_linear(self, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        if gpu_takes(x):
            from peagle.kernels.gpu import experts

            return experts.grouped_linear(x, self.weights, bias, ends)
        return reference.grouped_linear(x, self.weights, bias, ends)


def has_low_bit_kernel(form: LowBitForm, device: torch.device) -> bool:
    """Elsewhere low-bit weights would be expanded at every step."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= LOW_BIT_CAPABILITY[form.kind]


class Experts(nn.Module):
    """The experts' products in one tensor each: gates before ups, as in GatedMLP."""

    gate_up_proj: nn.Parameter | PackedWeight | LowBitMatrices
    down_proj: nn.Parameter | PackedWeight | LowBitMatrices

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        count, size, inner = experts.num_experts, config.hidden_size, experts.intermediate_size
        self.num_experts, self.is_low_bit = count, experts.low_bit is not None
        self.activation = config.activation
        self.clamp, self.gain = experts.clamp, experts.swish_gain
        self.gate_up_proj = _matrices((count, 2 * inner, size), experts.low_bit)
        self.down_proj = _matrices((count, size, inner), experts.low_bit)
        self.gate_up_proj_bias = self.down_proj_bias = None
        if experts.bias:
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 2 * inner))
            self.down_proj_bias = nn.Parameter(torch.zeros(count, size))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """[N, H] -> [N, H]"""
        if x.is_cuda and not (self.is_low_bit or _has_grouped_mm(x)):
            return self._dense(x, routing)
        num_rows, top_k = routing.experts.shape
        expert, order = routing.experts.flatten().sort(stable=True)  # [N * k]
        every = torch.arange(self.num_experts, device=x.device)
        groups = Groups(expert, torch.searchsorted(expert, every, right=True))
        inner = self._gated(
            grouped_linear(x[order // top_k], self.gate_up_proj, self.gate_up_proj_bias, groups)
        )
        outer = grouped_linear(inner, self.down_proj, self.down_proj_bias, groups)
        unsorted = torch.empty_like(outer).index_copy_(0, order, outer)
        weighted = unsorted.view(num_rows, top_k, -1) * routing.weights[..., None]
        return weighted.sum(1).to(x.dtype)

    def _dense(self, x: Tensor, routing: Routing) -> Tensor:
        """Every row through every expert: for GPUs without a grouped product."""
        assert isinstance(self.gate_up_proj, Tensor)
        assert isinstance(self.down_proj, Tensor)
        out = x.new_zeros(x.shape, dtype=at_least_float32(x).dtype)
        for expert in range(self.num_experts):
            weight = (routing.weights * (routing.experts == expert)).sum(-1, keepdim=True)
            bias, down_bias = (
                None if b is None else b[expert]
                for b in (self.gate_up_proj_bias, self.down_proj_bias)
            )
            inner = self._gated(F.linear(x, self.gate_up_proj[expert], bias))
            out += F.linear(inner, self.down_proj[expert], down_bias) * weight
        return out.to(x.dtype)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """[R, 2I] -> [R, I]"""
        if self.clamp is None:
            return gated(gate_up, self.activation)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        return (up + 1) * (gate * torch.sigmoid(gate * self.gain))


def _matrices(
    shape: tuple[int, int, int], form: LowBitForm | None
) -> nn.Parameter | LowBitMatrices:
    return nn.Parameter(torch.empty(shape)) if form is None else LowBitMatrices(shape, form)


class Groups(NamedTuple):
    """Rows that are sorted by their expert."""

    expert: Tensor  # [R]
    ends: Tensor  # [E] behind each expert's rows


def grouped_linear(
    x: Tensor, weight: Weight | LowBitMatrices, bias: Tensor | None, groups: Groups
) -> Tensor:
    """x [R, I], each row times its expert's weight of [E, O, I], plus its bias of [E, O]."""
    if isinstance(weight, LowBitMatrices):
        return weight.grouped_linear(x, bias, groups.ends)
    if x.is_cpu or isinstance(weight, PackedWeight):
        return _by_expert(x, weight, bias, groups)
    return _by_grouped_mm(x, weight, bias, groups)


def _by_expert(x: Tensor, weight: Weight, bias: Tensor | None, groups: Groups) -> Tensor:
    """One product for each expert that has rows. The kernel of `linear` gives a row the same bits
    whatever other rows the expert has."""
    out = x.new_empty(len(x), weight.shape[1])
    begin = 0
    for expert, end in enumerate(groups.ends.tolist()):
        if end > begin:
            own = None if bias is None else bias[expert]
            matrix = weight.expert(expert) if isinstance(weight, PackedWeight) else weight[expert]
            out[begin:end] = linear(x[begin:end], matrix, own)
        begin = end
    return out


def _by_grouped_mm(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    out = F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends.int())
    return out if bias is None else out + bias[groups.expert]


def _has_grouped_mm(x: Tensor) -> bool:
    capability = torch.cuda.get_device_capability(x.device)
    return x.dtype is torch.bfloat16 and capability >= GROUPED_MM_CAPABILITY


class MixtureOfExperts(nn.Module):
    """In the place of a layer's MLP."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.router = Router(config, experts)
        self.experts = Experts(config, experts)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x, self.router(x))
        return out


class MixtureBesideMLP(nn.Module):
    """Gemma-4's: beside an MLP, reading the residual stream, with norms of its own."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        super().__init__()
        self.router = NormedRouter(config, experts)
        self.pre_norm = make_norm(config, config.hidden_size)
        self.experts = Experts(config, experts)
        self.post_norm = make_norm(config, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.post_norm(self.experts(self.pre_norm(x), self.router(x)))
        return out

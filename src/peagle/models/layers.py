"""Building blocks of a Llama-family decoder, for targets and drafters alike.

Shapes: N rows, H hidden, h heads, g key-value heads, D head dimension, I intermediate.
Rows are flat: which rows belong together is the Attention object's business.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import linear_kernel_for
from peagle.kernels.cpu.ops import kernels_for
from peagle.kernels.policy import FAST, Policy, gpu_takes
from peagle.models.attention import Attention
from peagle.models.config import DecoderConfig

Rotation = tuple[Tensor, Tensor]  # cos and signed sin: [N, 1, D]


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, policy: Policy = FAST) -> Tensor:
    """x [N, I] times weight [O, I], plus bias [O]."""
    if kernel := linear_kernel_for(x, weight):
        out = kernel(x, weight)
        return out if bias is None else out.add_(bias)
    if _fused_takes(x, weight, policy):
        from peagle.kernels.gpu.linear import fused_linear

        return fused_linear(x, weight, bias, norm=None, residual=None, policy=policy)
    return F.linear(x, weight, bias)


def _fused_takes(x: Tensor, weight: Tensor, policy: Policy) -> bool:
    """Whether x [N, I] times weight [O, I] is one of the policy's fused products on a GPU."""
    row_major = x.stride(-1) == weight.stride(-1) == 1
    same_kind = x.dim() == 2 and x.dtype == weight.dtype
    return gpu_takes(x) and same_kind and row_major and policy.fits_fused(x, [weight])


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.dtype == weight.dtype and gpu_takes(x):
            from peagle.kernels.gpu.norms import rms_norm

            return rms_norm(x.reshape(-1, x.shape[-1]), weight, self.eps).view(x.shape)
        if x.dtype == weight.dtype and x.dtype.itemsize >= 4:
            if kernels := kernels_for(x):
                return kernels.rms_norm(x, weight, self.eps)
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # Half precision: normalised in float32 and rounded before the weight, as transformers does.
        normed = F.rms_norm(at_least_float32(x), weight.shape, None, self.eps)
        return normed.to(x.dtype) * weight


def output_logits(hidden: Tensor, weight: Tensor, policy: Policy = FAST) -> Tensor:
    """hidden [N, H], normed, times weight [V, H] -> [N, V].

    In float32 or better, the precision that sampling is defined in.
    """
    if gpu_takes(hidden) and hidden.dtype.itemsize < 4:
        if policy.batch_invariant:
            from peagle.kernels.gpu.linear import invariant_logits

            return invariant_logits(hidden, weight)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return at_least_float32(linear(hidden, weight, policy=policy))


class RotaryEmbedding(nn.Module):
    """cos and sin for given positions. The first half of sin is negated, for `rotate`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        frequencies = config.inverse_frequencies  # real even when the module is made on meta
        places = torch.arange(config.max_position_embeddings, device=frequencies.device)
        angles = torch.outer(places.float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)  # [P, D]
        sign = torch.ones_like(frequencies)
        signed = angles.sin() * torch.cat((-sign, sign))
        self.register_buffer("cos", angles.cos() * config.rope_scale, persistent=False)
        self.register_buffer("sin", signed * config.rope_scale, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = self.cos[positions], self.sin[positions]
        return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs (i, i + D/2) of x [N, heads, D], the Hugging Face convention."""
    cos, signed_sin = rotation
    if kernels := kernels_for(x):
        return kernels.rotate(x, cos, signed_sin)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, input_size: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.sliding_window(layer)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(input_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [N, h + 2g, D]
        qk, v = heads.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=-2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=-2)
        rotated = rotate(qk, rotation)
        q, k = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=-2)
        out: Tensor = self.o_proj(attention(self.layer, q, k, v, self.window).flatten(-2))
        return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [N, 2I] -> [N, I]."""
    if kernels := kernels_for(gate_up):
        return kernels.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class GatedMLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(size, 2 * inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def lay_out_for_cpu(module: nn.Module) -> None:
    """Stores each weight matrix column-major, keeping its shape, values and names.

    It is the order that linear.c needs, and the one that MKL streams fastest for few rows. On
    meta it costs nothing: weights are then loaded in that order.
    """
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            linear.weight.data = linear.weight.data.t().contiguous().t()

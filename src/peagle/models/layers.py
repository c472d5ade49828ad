"""Building blocks of a decoder, for targets and drafters alike; a mixture's are in experts.py.

Shapes: N rows, H hidden, h heads, g key-value heads, D head dimension, I intermediate.
Rows are flat: which rows belong together is the Attention object's business.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.cpu.linear import PackedWeight, Weight, unpacked
from peagle.kernels.cpu.ops import kernels_for
from peagle.kernels.policy import FAST, Policy, gpu_takes
from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.models.attention import Attention
from peagle.models.config import Activation, DecoderConfig, Rope

Rotation = tuple[Tensor, Tensor]  # cos and signed sin: [N, 1, R], of the R dimensions that turn


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None, policy: Policy = FAST) -> Tensor:
    """x [N, I] times weight [O, I], plus bias [O]."""
    if isinstance(weight, PackedWeight):
        return _packed_linear(x, weight, bias)
    if _fused_takes(x, weight, policy):
        from peagle.kernels.gpu.linear import fused_linear

        return fused_linear(x, weight, bias, norm=None, residual=None, policy=policy)
    return F.linear(x, weight, bias)


def _packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    tracked = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if tracked or x.dtype is not torch.float32:  # gradients, or autocast
        return F.linear(x, weight.unpacked(), bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = weight.product(rows).view(*x.shape[:-1], weight.num_outputs)
    return out if bias is None else out.add_(bias)


def _fused_takes(x: Tensor, weight: Tensor, policy: Policy) -> bool:
    """Whether x [N, I] times weight [O, I] is one of the policy's fused products on a GPU."""
    row_major = x.stride(-1) == weight.stride(-1) == 1
    same_kind = x.dim() == 2 and x.dtype == weight.dtype
    return gpu_takes(x) and same_kind and row_major and policy.fits_fused(x, [weight])


class Linear(nn.Linear):
    packed: PackedWeight | None = None  # in the place of `weight`: see models.binding

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, matrix_of(self), self.bias)


def matrix_of(linear: nn.Linear) -> Weight:
    """What its rows are multiplied with [O, I]."""
    packed = linear.packed if isinstance(linear, Linear) else None
    return linear.weight if packed is None else packed


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def scale(self) -> Tensor:
        """What normed rows are multiplied with."""
        return self.weight

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


class WideNorm(RMSNorm):
    """An RMSNorm that is rounded after its weight, not before: another result in half precision."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(size, eps)
        self.offset = offset  # of the weight, which is stored without it

    @property
    def scale(self) -> Tensor:
        weight = at_least_float32(self.weight)
        return weight + self.offset if self.offset else weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(at_least_float32(x), x.shape[-1:], self.scale, self.eps).to(x.dtype)


def make_norm(config: DecoderConfig, size: int) -> RMSNorm:
    """A norm over `size` values, of the decoder's kind."""
    if config.norm == "rounded":
        return RMSNorm(size, config.rms_norm_eps)
    return WideNorm(size, config.rms_norm_eps, offset=float(config.norm == "one_plus"))


def norm_without_weight(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(at_least_float32(x), x.shape[-1:], None, eps).to(x.dtype)


def output_logits(hidden: Tensor, weight: Weight, policy: Policy = FAST) -> Tensor:
    """hidden [N, H], normed, times weight [V, H] -> [N, V].

    In float32 or better, the precision that sampling is defined in.
    """
    if gpu_takes(hidden) and hidden.dtype.itemsize < 4:
        if policy.batch_invariant:
            from peagle.kernels.gpu.linear import invariant_logits

            return invariant_logits(hidden, unpacked(weight))
        return torch.mm(hidden, unpacked(weight).t(), out_dtype=torch.float32)
    return at_least_float32(linear(hidden, weight, policy=policy))


class RotaryEmbedding(nn.Module):
    """cos and sin for given positions. The first half of sin is negated, for `rotate`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope, num_positions: int) -> None:
        super().__init__()
        frequencies = rope.inverse_frequencies  # real even when the module is made on meta
        places = torch.arange(num_positions, device=frequencies.device)
        angles = torch.outer(places.float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)  # [P, R]
        sign = torch.ones_like(frequencies)
        signed = angles.sin() * torch.cat((-sign, sign))
        self.register_buffer("cos", angles.cos() * rope.scale, persistent=False)
        self.register_buffer("sin", signed * rope.scale, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        cos, sin = self.cos[positions], self.sin[positions]
        return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs (i, i + R/2) of x [N, heads, D], the Hugging Face convention; what stands
    behind the R dimensions that turn is left as it is."""
    cos, signed_sin = rotation
    turning = cos.shape[-1]
    if turning < x.shape[-1]:
        return torch.cat((rotate(x[..., :turning].contiguous(), rotation), x[..., turning:]), -1)
    if kernels := kernels_for(x):
        return kernels.rotate(x, cos, signed_sin)
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, signed_sin)


class SelfAttention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, input_size: int) -> None:
        super().__init__()
        sizes = config.attention(layer)
        self.layer = layer
        self.window = config.sliding_window(layer)
        self.num_heads = config.num_attention_heads
        self.num_kv_heads, self.head_dim = sizes.num_key_value_heads, sizes.head_dim
        self.norms_all_heads = config.norms_all_heads
        self.scale, self.cap = config.query_scale, config.score_cap
        self.value_norm_eps = config.rms_norm_eps if config.value_norm else None
        # Query, key and, where it is not the key, value: their heads in `qkv_proj`.
        self.parts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        if sizes.value_is_key:
            self.parts.pop()
        q_size, k_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(input_size, sum(self.parts) * self.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            whole = config.norms_all_heads
            self.q_norm = make_norm(config, q_size if whole else self.head_dim)
            self.k_norm = make_norm(config, k_size if whole else self.head_dim)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if config.sinks else None

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [N, h + 2g, D]
        num_qk = self.num_heads + self.num_kv_heads
        qk, v = heads[..., :num_qk, :], heads[..., -self.num_kv_heads :, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=-2)
            qk = torch.cat((self._normed(q, self.q_norm), self._normed(k, self.k_norm)), dim=-2)
        if self.value_norm_eps is not None:
            v = norm_without_weight(v, self.value_norm_eps)
        rotated = rotate(qk, rotation)
        q, k = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=-2)
        attended = attention(self.layer, q, k, v, self.window, self._scores)
        out: Tensor = self.o_proj(attended.flatten(-2))
        return out

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        if not self.norms_all_heads:
            return norm(x)  # type: ignore[no-any-return]
        return norm(x.flatten(-2)).view(x.shape)  # type: ignore[no-any-return]

    @property
    def _scores(self) -> Scores:
        if self.scale is None and self.cap is None and self.sinks is None:
            return PLAIN
        return Scores(self.scale, self.cap, self.sinks)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up: [N, 2I] -> [N, I]."""
    if activation == "silu":
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


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
        self.activation = config.activation
        self.gate_up_proj = Linear(size, 2 * inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated(self.gate_up_proj(x), self.activation))
        return out


class DecoderLayer(nn.Module):
    """Norms stand before attention and before the MLP. `mlp` may be a mixture of experts."""

    def __init__(self, config: DecoderConfig, layer: int, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = SelfAttention(config, layer, config.hidden_size)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.mlp = GatedMLP(config) if mlp is None else mlp

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), rotation, attention))
        out: Tensor = x + self._scaled(self.mlp(self.post_attention_layernorm(x)))
        return out

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class PostNormLayer(nn.Module):
    """Norms stand behind attention and behind the MLP (OLMo-2), or before and behind (Gemma)."""

    def __init__(self, config: DecoderConfig, layer: int, experts: nn.Module | None = None) -> None:
        super().__init__()
        size, around = config.hidden_size, config.norm_places == "around"
        self.input_layernorm = make_norm(config, size) if around else None
        self.self_attn = SelfAttention(config, layer, size)
        self.post_attention_layernorm = make_norm(config, size)
        self.pre_feedforward_layernorm = make_norm(config, size) if around else None
        self.mlp = GatedMLP(config)
        self.moe = experts  # beside the MLP, with norms of its own
        self.post_feedforward_layernorm_1 = None if experts is None else make_norm(config, size)
        self.post_feedforward_layernorm = make_norm(config, size)
        self.layer_scalar = nn.Parameter(torch.ones(1)) if config.layer_scalar else None

    def forward(self, x: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        attended = self.self_attn(_maybe(self.input_layernorm, x), rotation, attention)
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(_maybe(self.pre_feedforward_layernorm, x))
        if self.moe is not None:
            inner = _maybe(self.post_feedforward_layernorm_1, inner) + self.moe(x)
        x = x + self.post_feedforward_layernorm(inner)
        return x if self.layer_scalar is None else x * self.layer_scalar


def _maybe(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)

"""Sizes of a dense Llama-family decoder, read once from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from peagle.errors import ModelError
from peagle.models.rope import rope_parameters

# Families whose forward pass is the same decoder with different switches.
SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    inverse_frequencies: Tensor  # [head_dim / 2]
    rope_scale: float = 1.0  # yarn scales cos and sin
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere

    def sliding_window(self, layer: int) -> int | None:
        return self.sliding_windows[layer] if self.sliding_windows else None

    @classmethod
    def sizes_of(cls, config: Any) -> DecoderConfig:
        """What every family says in the same words; its own habits are left at their defaults."""
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        inverse_frequencies, rope_scale = rope_parameters(
            config.rope_parameters or {},
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            inverse_frequencies=inverse_frequencies,
            rope_scale=rope_scale,
            tie_word_embeddings=config.tie_word_embeddings,
        )

    @classmethod
    def from_transformers(cls, config: Any) -> DecoderConfig:
        family = config.model_type
        if family not in SUPPORTED_MODEL_TYPES:
            raise ModelError(
                f"model type {family!r} has no native implementation",
                hint=f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}",
            )
        if config.hidden_act != "silu":
            raise ModelError(f"activation {config.hidden_act!r} is not supported", hint="silu is")
        llama_bias = family == "llama" and config.attention_bias
        qwen3_bias = family == "qwen3" and config.attention_bias
        return replace(
            cls.sizes_of(config),
            qkv_bias=llama_bias or qwen3_bias or family == "qwen2",
            output_bias=llama_bias or qwen3_bias,
            mlp_bias=family == "llama" and config.mlp_bias,
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(config),
        )


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    if config.model_type == "llama" or config.sliding_window is None:  # Llama's is never used
        return ()
    if config.model_type == "mistral":  # one window for all layers
        kinds = ["sliding_attention"] * config.num_hidden_layers
    else:
        kinds = config.layer_types
    return tuple(config.sliding_window if k == "sliding_attention" else None for k in kinds)

"""A tiny config of every family and of what makes its members differ; and of some that have no
native target: their attention is enough for the engine's cache, or it is not."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import (
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from .models import UNEVEN

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 12,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 7,
    "layer_types": ALTERNATING,
}
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
PER_LAYER_INPUTS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 59,
    "num_kv_shared_layers": 2,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}


class Family(NamedTuple):
    kind: type[PretrainedConfig]
    options: dict[str, Any]

    def __call__(self, **changes: Any) -> PretrainedConfig:
        return self.kind(**{**UNEVEN.target, **self.options, **changes})


def make(family: type[PretrainedConfig], **options: Any) -> Family:
    return Family(family, options)


FAMILIES: dict[str, Family] = {
    "llama": make(LlamaConfig),
    "llama-biases": make(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-tied": make(LlamaConfig, tie_word_embeddings=True),
    "llama-wide-heads": make(LlamaConfig, head_dim=12, num_key_value_heads=1),
    "llama-one-kv-head-each": make(LlamaConfig, num_key_value_heads=4),
    "llama-llama3": make(LlamaConfig, rope_parameters=LLAMA3),
    "llama-linear": make(LlamaConfig, rope_parameters=LINEAR),
    "llama-yarn": make(LlamaConfig, rope_parameters=YARN),
    "llama-that-names-a-window": make(LlamaConfig, sliding_window=7),
    "mistral": make(MistralConfig, sliding_window=None),
    "mistral-window": make(MistralConfig, sliding_window=7, head_dim=12),
    "qwen2": make(Qwen2Config),
    "qwen2-window": make(Qwen2Config, tie_word_embeddings=True, **WINDOW),
    "qwen2-unused-window": make(Qwen2Config, sliding_window=7),
    "qwen3": make(Qwen3Config, head_dim=12, tie_word_embeddings=True),
    "qwen3-bias-window": make(Qwen3Config, head_dim=10, attention_bias=True, **WINDOW),
    "qwen3-yarn": make(Qwen3Config, head_dim=8, rope_parameters=YARN),
    "qwen3-moe": make(Qwen3MoeConfig, head_dim=12, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-dense-layers": make(
        Qwen3MoeConfig, head_dim=12, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "mixtral": make(MixtralConfig, num_local_experts=6, num_experts_per_tok=3),
    "gpt-oss": make(
        GptOssConfig, head_dim=8, num_local_experts=6, num_experts_per_tok=3, sliding_window=7
    ),
    "gemma2": make(Gemma2Config, head_dim=12, sliding_window=7, query_pre_attn_scalar=20, **CAPS),
    "gemma3": make(
        Gemma3TextConfig, head_dim=12, sliding_window=7, layer_types=ALTERNATING, **CAPS
    ),
    "gemma3-linear": make(
        Gemma3TextConfig,
        head_dim=8,
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma4": make(Gemma4TextConfig, **GEMMA4, final_logit_softcapping=2.0),
    "gemma4-moe": make(Gemma4TextConfig, **GEMMA4, **GEMMA4_EXPERTS, tie_word_embeddings=True),
    "phi3": make(Phi3Config, sliding_window=7, pad_token_id=None),
    "phi3-partial-rope": make(Phi3Config, pad_token_id=None, partial_rotary_factor=0.5),
    "olmo2": make(Olmo2Config, pad_token_id=None),
    "granite": make(GraniteConfig, mlp_bias=True, **MULTIPLIERS),
}
# Keys and values are all that they remember.
ADAPTED: dict[str, Family] = {
    "gpt2": make(GPT2Config),
    "gpt-neox": make(GPTNeoXConfig),
    "cohere": make(CohereConfig, logit_scale=0.3, pad_token_id=None),
}
# Convolutions, gated delta rules, biases of attention; a value that is not as wide as its key;
# layers that look tokens up in tables of their own and share keys.
RECOMPUTED: dict[str, Family] = {
    "lfm2": make(Lfm2Config, layer_types=["conv", "full_attention"] * 2),
    "qwen3-next": make(
        Qwen3NextConfig,
        head_dim=8,
        **EXPERTS,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "bloom": make(BloomConfig),
    "gemma4-e2b": make(
        Gemma4TextConfig,
        **GEMMA4 | PER_LAYER_INPUTS | {"attention_k_eq_v": False},
        use_double_wide_mlp=True,
    ),
}
# Also computed again; there is no one hidden state behind a layer.
SEVERAL_STATES: dict[str, Family] = {
    "gemma3n": make(
        Gemma3nTextConfig,
        **PER_LAYER_INPUTS,
        head_dim=8,
        sliding_window=7,
        layer_types=ALTERNATING,
        laurel_rank=4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    ),
}

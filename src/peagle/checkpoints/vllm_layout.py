"""config.json of vLLM's raw layout, written: a Llama config with EAGLE-3's keys.

vLLM fills missing keys with defaults and ignores what it does not know, so every key that it
reads is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from peagle.checkpoints.layouts import OURS

if TYPE_CHECKING:
    from peagle.models.head_config import HeadConfig

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "vocab_size"),
)
SWITCHES = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("attention_bias", "mlp_bias"),
)
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order vLLM looks
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Written under the key `peagle`, because the layout has no place for them.
OWN_FIELDS = (
    *("target_model", "target_num_hidden_layers", "max_position_embeddings"),
    *("max_speculative_tokens", "num_speculative_tokens", "has_embed_tokens", "has_lm_head"),
)


def write_options(
    config: HeadConfig, mask_token_id: int | None, max_position_embeddings: int
) -> dict[str, Any]:
    """The config.json. `max_position_embeddings` is what vLLM sizes its tables by."""
    layers = list(config.aux_hidden_state_layer_ids)
    options: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in (*SIZES, *SWITCHES)},
        "max_position_embeddings": max_position_embeddings,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        **_written_rope(config.rope_parameters),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "num_aux_hidden_states": len(layers),
        LAYER_IDS: layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
            LAYER_IDS: layers,
        },
        OURS: {name: getattr(config, name) for name in OWN_FIELDS},
    }
    if mask_token_id is not None:
        options |= dict.fromkeys(MASK_KEYS, mask_token_id)
    return options


def _written_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """In transformers' present words and in its former ones, which older versions of vLLM read."""
    written = {"rope_parameters": dict(parameters), "rope_theta": parameters["rope_theta"]}
    if parameters.get("rope_type", "default") != "default":
        written["rope_scaling"] = dict(parameters)
    return written

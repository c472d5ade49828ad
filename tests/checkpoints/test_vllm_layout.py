"""What vLLM is told of a head: each value is the head's own, none a default that happens to fit.

No two values of this head are equal, and none is a default of vLLM's or of transformers'.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from peagle.checkpoints.heads.speculators_layout import unwrap, wrap
from peagle.checkpoints.heads.vllm_layout import SWITCHES, read_options, write_options
from peagle.models.head_config import HeadConfig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 4.5,
    "original_max_position_embeddings": 8192,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
HEAD = HeadConfig(
    method="p-eagle",
    target_model="org/target",
    target_hidden_size=96,
    target_num_hidden_layers=36,
    vocab_size=1000,
    aux_hidden_state_layer_ids=(3, 17, 33),
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=16384,
    rms_norm_eps=3e-6,
    rope_parameters=LLAMA3,
    draft_vocab_size=700,
    max_speculative_tokens=11,
    num_speculative_tokens=6,
    has_embed_tokens=True,
    has_lm_head=True,
    mask_token_id=999,
    sliding_window=1536,
)
OWN_TABLES = ("embed_tokens.weight", "lm_head.weight")


def written(head: HeadConfig = HEAD, positions: int = 32768) -> dict[str, Any]:
    return write_options(head, head.mask_token_id, positions)


def read(options: dict[str, Any]) -> dict[str, Any]:
    found = read_options(options, OWN_TABLES, "config.json")
    return found | {"aux_hidden_state_layer_ids": tuple(found["aux_hidden_state_layer_ids"])}


def test_every_value_is_the_heads_own() -> None:
    layers = [3, 17, 33]
    assert written() == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 3e-6,
        "rope_parameters": LLAMA3,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
        "attention_bias": False,
        "mlp_bias": False,
        "logit_scale": 1.0,
        "tie_word_embeddings": False,
        "sliding_window": 1536,
        "layer_types": ["sliding_attention"] * 5,
        "vocab_size": 1000,
        "draft_vocab_size": 700,
        "target_hidden_size": 96,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
            "eagle_aux_hidden_state_layer_ids": layers,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "mask_token_id": 999,
        "pard_token": 999,
        "ptd_token_id": 999,
        "peagle": {
            "target_model": "org/target",
            "target_num_hidden_layers": 36,
            "max_position_embeddings": 16384,
            "max_speculative_tokens": 11,
            "num_speculative_tokens": 6,
            "has_embed_tokens": True,
            "has_lm_head": True,
        },
    }


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_is_written_under_its_own_name(switch: str) -> None:
    options = written(replace(HEAD, **{switch: True}))
    assert {name for name in SWITCHES if options[name]} == {switch}
    assert options["eagle_config"]["norm_before_fc"] is (switch == "norm_before_fc")


@pytest.mark.parametrize("rope", [LLAMA3, DEFAULT_ROPE], ids=["scaled", "default"])
def test_older_words_for_rope_say_the_same(rope: dict[str, Any]) -> None:
    """Versions of vLLM before `rope_parameters` read `rope_theta` and `rope_scaling` alone."""
    options = written(replace(HEAD, rope_parameters=rope))
    older = {name: value for name, value in options.items() if name != "rope_parameters"}
    assert options["rope_theta"] == rope["rope_theta"]
    assert ("rope_scaling" in options) == (rope is LLAMA3)
    assert read(older)["rope_parameters"] == read(options)["rope_parameters"] == rope


@pytest.mark.parametrize("window", [1536, None])
def test_what_is_written_is_read_back(window: int | None) -> None:
    head = replace(HEAD, sliding_window=window)
    assert HeadConfig(**read(written(head))) == head


def test_a_window_that_no_layer_has_is_none() -> None:
    """So it is in vLLM."""
    options = written()
    options["layer_types"] = ["full_attention"] * 5
    assert read(options)["sliding_window"] is None
    del options["layer_types"]
    assert read(options)["sliding_window"] is None


def test_what_is_written_is_read_back_through_the_speculators_layout() -> None:
    verifier = {"name_or_path": HEAD.target_model, "architectures": ["LlamaForCausalLM"]}
    config = wrap(written(), HEAD.method, HEAD.num_speculative_tokens, verifier)
    assert config["transformer_layer_config"]["rope_theta"] == 500000.0
    assert config["transformer_layer_config"]["rope_scaling"] == LLAMA3
    assert config["target_hidden_size"] == 96
    assert HeadConfig(**read(unwrap(config, "config.json"))) == HEAD


OTHER_VALUES: dict[str, Any] = {
    "method": "eagle3",
    "target_model": "org/other",
    "aux_hidden_state_layer_ids": (4, 17, 33),
    "rope_parameters": DEFAULT_ROPE,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    "name", [field.name for field in fields(HeadConfig) if field.name != "correction_size"]
)
def test_no_field_is_lost(name: str) -> None:
    changed = replace(HEAD, **{name: _other_value(name)})
    if name == "method":  # told by the mask token alone
        changed = replace(changed, mask_token_id=None)
    assert written(changed) != written()


def _other_value(name: str) -> Any:
    value = getattr(HEAD, name)
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not value if isinstance(value, bool) else value + 1

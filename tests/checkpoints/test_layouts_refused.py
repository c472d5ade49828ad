"""What a foreign head leaves open, or means and we cannot run, is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import HeadError
from peagle.models.target import TargetModel
from tests.checkpoints.foreign_heads import (
    change_config,
    change_tensors,
    load,
    raw_config,
    raw_tensors,
    speculators_config,
    write,
)
from tests.tiny.models import UNEVEN


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return UNEVEN.make_target(torch.float32)


@pytest.fixture
def raw(target: TargetModel, tmp_path: Path) -> Path:
    return write(tmp_path / "raw", raw_config(), raw_tensors(target))


@pytest.fixture
def speculators(target: TargetModel, tmp_path: Path) -> Path:
    return write(tmp_path / "speculators", speculators_config(), raw_tensors(target))


def refused(folder: Path, target: TargetModel) -> HeadError:
    with pytest.raises(HeadError) as caught:
        load(folder, target)
    assert "\n" not in str(caught.value)
    assert str(folder) in caught.value.message
    return caught.value


NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "vocab_size", "rope_theta"),
)


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_that_cannot_be_inferred_is_named(
    key: str, raw: Path, target: TargetModel
) -> None:
    change_config(raw, lambda c: c.pop(key))
    assert f"lacks {key}" in refused(raw, target).message


def test_missing_layer_ids_name_what_vllm_would_take(raw: Path, target: TargetModel) -> None:
    change_config(raw, lambda c: c["eagle_config"].pop("eagle_aux_hidden_state_layer_ids"))
    error = refused(raw, target)
    assert "lacks eagle_aux_hidden_state_layer_ids" in error.message
    assert "2, L//2 and L-3" in str(error.hint)


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("window", "named"),
    [("8", 'sliding_window cannot be "8"'), (7, "less than a tree's depth"), (None, "lacks")],
)
def test_windows_that_no_head_has_are_named(
    window: Any, named: str, raw: Path, target: TargetModel
) -> None:
    options = {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    change_config(raw, lambda c: c.update(options))
    assert named in refused(raw, target).message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("model_type", "qwen3", "model_type='qwen3' is not supported"),
        ("hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("logit_scale", 0.5, "logit_scale=0.5 is not supported"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor=0.5 is not supported"),
        ("is_causal", False, "is_causal=False is not supported"),
        ("qkv_bias", True, "qkv_bias=True is not supported"),
        ("bias", True, "bias=True is not supported"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config="),
        ("layer_types", ["full_attention", "sliding_attention"], "'sliding_attention'] are not"),
        ("layer_types", 3, "layer_types 3 are not supported"),
        ("layer_types", ["sliding_attention"], "lacks sliding_window"),
        ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state=false"),
        ("eagle_config", 7, "eagle_config cannot be 7"),
        ("num_aux_hidden_states", 4, "num_aux_hidden_states is 4"),
        ("pard_token", 3, "names several mask ids"),
        ("pard_token", [57], "names several mask ids"),
        ("architectures", ["Eagle3Qwen3ForCausalLM"], "not a config of a known head"),
        ("architectures", None, "not a config of a known head"),
        (LAYERS, [1, 2, 3], f"{LAYERS} is [1, 2, 3], but [1, 2, 4] in eagle_config"),
        ("fc_norm", "yes", 'fc_norm cannot be "yes"'),
        ("hidden_size", "32", 'hidden_size cannot be "32"'),
        ("num_attention_heads", 0, "num_attention_heads 0 is not positive"),
        ("head_dim", 0, "head_dim 0 is not positive"),
        ("rope_parameters", 7, "rope_parameters cannot be 7"),
        ("peagle", {"max_depth": 3}, "unknown key 'max_depth' in peagle"),
        ("peagle", {"num_speculative_tokens": "5"}, 'num_speculative_tokens cannot be "5"'),
        ("peagle", 7, "peagle cannot be 7"),
    ],
)
def test_what_our_layers_do_not_compute_is_named(
    key: str, value: Any, named: str, raw: Path, target: TargetModel
) -> None:
    change_config(raw, lambda c: c.update({key: value}))
    assert named in refused(raw, target).message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("mask_token_id"), "lacks mask_token_id"),
        (lambda c: c.pop("draft_vocab_size"), "lacks draft_vocab_size"),
        (lambda c: c.pop("transformer_layer_config"), "lacks transformer_layer_config"),
        (lambda c: c.update(transformer_layer_config=[]), "transformer_layer_config cannot be []"),
        (lambda c: c.update(peagle=[1]), "peagle cannot be [1]"),
        (lambda c: c.update(mask_token_id="57"), 'mask_token_id cannot be "57"'),
        (lambda c: c["transformer_layer_config"].pop("model_type"), "model_type"),
        (lambda c: c["transformer_layer_config"].update(model_type="qwen3"), "qwen3"),
        (lambda c: c["transformer_layer_config"].pop("rms_norm_eps"), "lacks rms_norm_eps"),
        (lambda c: c.pop("speculators_config"), "speculators_config is not complete"),
        (lambda c: c["speculators_config"].pop("verifier"), "speculators_config is not complete"),
        (lambda c: c.update(speculators_model_type="dflash"), "'dflash' is not supported"),
        (lambda c: c.update(eagle_aux_hidden_state_layer_ids=None), "lacks eagle_aux"),
        (lambda c: c.update(speculators_model_type="eagle3"), "has a mask_token_id"),
        (
            lambda c: (
                c.update(speculators_model_type="eagle3", mask_token_id=None),
                c.pop("norm_before_residual"),
                c["transformer_layer_config"].pop("norm_before_residual"),
            ),
            "lacks norm_before_residual",
        ),
    ],
)
def test_a_speculators_config_that_leaves_a_guess_is_refused(
    change: Any, named: str, speculators: Path, target: TargetModel
) -> None:
    change_config(speculators, change)
    assert named in refused(speculators, target).message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("mask_hidden"), "mask_hidden is not among the tensors"),
        (lambda t: t.pop("layers.3.mlp.up_proj.weight"), "layers.3.mlp.up_proj.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "tensor model.norm.weight"),
        (lambda t: t.update(mask_hidden=torch.ones(1, 95)), "mask_hidden has shape [95]"),
        (lambda t: t.update({"input_norm.weight": torch.ones(96)}), "tensor input_norm.weight"),
        (lambda t: t.update(d2t=torch.ones(59, dtype=torch.int64)), "has d2t"),
        (lambda t: t.update(t2d=torch.zeros(59, dtype=torch.bool)), "t2d does not mark"),
        (lambda t: t.update(t2d=torch.ones(58, dtype=torch.bool)), "t2d does not mark"),
        (lambda t: t.update({"midlayer.mlp.up_proj.weight": torch.ones(24, 32)}), "layer 0 twice"),
        (lambda t: t.update({"lm_head.weight": torch.ones(23, 32)}), "lm_head.weight has shape"),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(57, 32)}),
            "mask id 57 is not a row",
        ),
    ],
)
def test_wrong_tensors_are_named(change: Any, named: str, raw: Path, target: TargetModel) -> None:
    change_tensors(raw, change)
    assert named in refused(raw, target).message


def test_a_mask_hidden_without_a_mask_id_is_no_eagle3_head(raw: Path, target: TargetModel) -> None:
    change_config(raw, lambda c: (c.pop("pard_token"), c.pop("ptd_token_id")))
    assert "lacks its mask id" in refused(raw, target).message


def test_a_head_without_weights_is_refused(raw: Path, target: TargetModel) -> None:
    (raw / "model.safetensors").unlink()
    assert "no weights" in refused(raw, target).message

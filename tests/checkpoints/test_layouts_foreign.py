"""Heads that others made load with vLLM's meaning of every tensor and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.references import resolve_head
from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel
from tests.checkpoints.foreign_heads import (
    AUX_LAYERS,
    MASK,
    load,
    raw_config,
    raw_tensors,
    speculators_config,
    write,
)
from tests.tiny.models import UNEVEN
from tests.tolerance import near

EPS = 1e-5


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return UNEVEN.make_target(torch.float32)


@pytest.fixture(scope="module")
def tensors(target: TargetModel) -> dict[str, Tensor]:
    return raw_tensors(target)


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def test_a_head_in_the_layout_of_the_released_ones_loads(
    target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    network = load(write(tmp_path / "head", raw_config(), tensors), target)
    config = network.config
    assert (config.method, config.mask_token_id, config.num_hidden_layers) == ("p-eagle", MASK, 4)
    assert config.aux_hidden_state_layer_ids == tuple(AUX_LAYERS)
    assert config.has_embed_tokens
    assert config.has_lm_head
    assert config.max_speculative_tokens == MAX_SPECULATIVE_TOKENS
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert torch.equal(network.mask_embedding, tensors["embed_tokens.weight"][MASK])
    assert torch.equal(network.mask_hidden, tensors["mask_hidden"][0])
    q = network.layers[0].self_attn.qkv_proj.weight[:24]
    assert torch.equal(q, tensors["layers.0.self_attn.q_proj.weight"])


def test_a_head_in_the_layout_of_speculators_loads(
    target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    shaped = {**tensors, "mask_hidden": tensors["mask_hidden"].view(1, 1, -1)}
    folder = write(tmp_path / "head", speculators_config(num_depths=8), shaped)
    network = load(folder, target)
    config = network.config
    assert (config.method, config.mask_token_id) == ("p-eagle", MASK)
    assert (config.num_speculative_tokens, config.max_speculative_tokens) == (6, 8)
    assert config.target_model == "org/target"
    assert torch.equal(network.mask_hidden, tensors["mask_hidden"][0])


def test_an_eagle3_head_of_speculators_loads(target: TargetModel, tmp_path: Path) -> None:
    changes = {"method": "eagle3", "draft_vocab_size": 23, "has_embed_tokens": False}
    tensors = raw_tensors(target, layers=1, **changes)
    ids = torch.arange(59)[5:28]
    tensors["d2t"] = ids - torch.arange(23)
    tensors["t2d"] = torch.zeros(59, dtype=torch.bool).index_fill(0, ids, True)
    config = speculators_config("eagle3", draft_vocab_size=23, norm_before_residual=True)
    config["transformer_layer_config"]["num_hidden_layers"] = 1
    network = load(write(tmp_path / "head", config, tensors), target)
    assert network.config.method == "eagle3"
    assert network.config.norm_before_residual
    assert network.config.mask_token_id is None
    assert network.target_ids.tolist() == ids.tolist()
    assert network.embed(torch.tensor([3])).tolist() == [target.embed_tokens.weight[3].tolist()]


def test_old_heads_name_layer_0_midlayer(target: TargetModel, tmp_path: Path) -> None:
    tensors = raw_tensors(target, layers=1)
    old = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    assert "midlayer.hidden_norm.weight" in old
    config = raw_config(num_hidden_layers=1)
    ours = load(write(tmp_path / "new", config, tensors), target)
    theirs = load(write(tmp_path / "old", config, old), target)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_head_without_tables_uses_the_targets(
    target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    """Then the mask embedding is the target's own row of the mask id."""
    bare = without(tensors, "embed_tokens.weight", "lm_head.weight")
    network = load(write(tmp_path / "head", raw_config(), bare), target)
    assert network.output_weight() is target.lm_head.weight
    assert torch.equal(network.mask_embedding, target.embed_tokens.weight[MASK])
    assert torch.equal(network.embed(torch.tensor([2])), target.embed_tokens.weight[2:3])


def test_shards_are_read(target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "head", raw_config(), tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load(write(tmp_path / "whole", raw_config(), tensors), target)
    pairs = zip(whole.parameters(), load(folder, target).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_hidden_norms_that_vllm_never_applies_are_dropped(
    target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    more = {**tensors, "layers.2.hidden_norm.weight": torch.full((32,), 7.0)}
    assert load(write(tmp_path / "head", raw_config(), more), target)


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_each_name_of_the_mask_id_is_known(
    key: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    config = without(raw_config(), "pard_token", "ptd_token_id") | {key: MASK}
    assert read_head_config(write(tmp_path / "head", config, tensors)).mask_token_id == MASK


def test_sizes_that_follow_from_others_may_be_left_out(target: TargetModel, tmp_path: Path) -> None:
    sizes = {"head_dim": 8, "num_key_value_heads": 4}
    config = without(raw_config(), "head_dim", "num_key_value_heads", "draft_vocab_size")
    network = load(write(tmp_path / "head", config, raw_tensors(target, **sizes)), target)
    assert network.config.head_dim == 8
    assert network.config.num_key_value_heads == 4
    assert not network.config.reduced_vocabulary


@pytest.mark.parametrize("scaling", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_in_old_and_new_words(
    scaling: str, target: TargetModel, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    old = scaling == "rope_scaling"
    rope = {"type" if old else "rope_type": "linear", "factor": 2.0}
    if not old:
        rope["rope_theta"] = 10000.0
    config = without(raw_config(), *(() if old else ("rope_theta",))) | {scaling: rope}
    scaled = load(write(tmp_path / "scaled", config, tensors), target)
    plain = load(write(tmp_path / "plain", raw_config(), tensors), target)
    assert torch.equal(scaled.rotary.cos[8], plain.rotary.cos[4])
    assert not torch.equal(scaled.rotary.cos[8], plain.rotary.cos[8])


def test_norm_before_fc_and_fc_norm_are_applied_as_in_vllm(
    target: TargetModel, tmp_path: Path
) -> None:
    """One norm over the aux hidden states together, one over each; the mask hidden takes both."""
    options = {"norm_before_fc": True, "fc_norm": True}
    tensors = raw_tensors(target, **options)
    network = load(write(tmp_path / "head", raw_config(**options), tensors), target)
    aux_hidden_states = torch.randn(5, 96)
    x = F.rms_norm(aux_hidden_states, (96,), tensors["input_norm.weight"], EPS)
    parts = [
        F.rms_norm(part, (32,), tensors[f"fc_norm.{i}.weight"], EPS)
        for i, part in enumerate(x.split(32, dim=-1))
    ]
    expected = torch.cat(parts, dim=-1) @ tensors["fc.weight"].T
    torch.testing.assert_close(
        network.features(aux_hidden_states), expected, **near(expected, terms=96)
    )
    mask = PEagleDrafter(network).mask_feature
    expected = network.features(tensors["mask_hidden"])[0]
    torch.testing.assert_close(mask, expected, **near(expected, terms=96))


def test_norm_before_fc_may_stand_in_eagle_config(target: TargetModel, tmp_path: Path) -> None:
    config = raw_config()
    config["eagle_config"]["norm_before_fc"] = True
    folder = write(tmp_path / "head", config, raw_tensors(target, norm_before_fc=True))
    assert load(folder, target).input_norm is not None


def test_biases_are_loaded_into_their_projections(target: TargetModel, tmp_path: Path) -> None:
    options = {"attention_bias": True, "mlp_bias": True}
    tensors = raw_tensors(target, **options)
    network = load(write(tmp_path / "head", raw_config(**options), tensors), target)
    for number, layer in enumerate(network.layers):
        name = f"layers.{number}.self_attn"
        parts = [tensors[f"{name}.{p}_proj.bias"] for p in "qkv"]
        assert torch.equal(layer.self_attn.qkv_proj.bias, torch.cat(parts))
        assert torch.equal(layer.self_attn.o_proj.bias, tensors[f"{name}.o_proj.bias"])
        down = tensors[f"layers.{number}.mlp.down_proj.bias"]
        assert torch.equal(layer.mlp.down_proj.bias, down)


def test_a_hugging_face_id_is_downloaded_as_a_target_is(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "head", raw_config(), tensors)
    asked = []

    def download(repository: str, **_: Any) -> str:
        asked.append(repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_head("org/head-p-eagle") == folder
    assert asked == ["org/head-p-eagle"]

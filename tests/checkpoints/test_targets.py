"""A model folder becomes a target, or one line that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig

from peagle.checkpoints.targets import eos_token_ids, load_target
from peagle.errors import ModelError
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN, save_reference

TIED = LlamaConfig(**UNEVEN.target | {"tie_word_embeddings": True})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    return load_target(folder, dtype=dtype, device=torch.device("cpu"))


def refused(folder: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_reference(tmp_path / "model")
    return tmp_path / "model"


def test_a_target_is_ready_to_run(folder: Path) -> None:
    target = load(folder)
    assert not target.training
    assert not any(p.requires_grad or p.is_meta for p in target.parameters())
    assert not any(b.is_meta for b in target.buffers())


def test_cos_and_sin_stay_float32_in_a_half_precision_target(folder: Path) -> None:
    target = load(folder, torch.bfloat16)
    assert {b.dtype for b in target.buffers()} == {torch.float32}


def test_tied_tables_are_one_tensor_after_loading(tmp_path: Path) -> None:
    save_reference(tmp_path, TIED)
    target = load(tmp_path)
    assert target.lm_head.weight is target.embed_tokens.weight
    assert target.lm_head.weight.data_ptr() == target.embed_tokens.weight.data_ptr()


def test_a_needless_copy_of_a_tied_table_is_passed_over(tmp_path: Path) -> None:
    save_reference(tmp_path, TIED)
    change_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert load(tmp_path).lm_head.weight.shape == (59, 32)


def test_a_tied_table_that_differs_is_refused(tmp_path: Path) -> None:
    """transformers would use it and vLLM would not: whoever guesses is wrong for somebody."""
    save_reference(tmp_path, TIED)
    change_tensors(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})
    )
    error = refused(tmp_path)
    assert "lm_head.weight" in error.message
    assert "tie_word_embeddings" in str(error.hint)


def test_stored_rope_frequencies_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    before = load(folder)
    change_tensors(folder, lambda t: t.update({name: torch.ones(4)}))
    after = load(folder)
    assert after.state_dict().keys() == before.state_dict().keys()
    assert torch.equal(after.rotary.cos, before.rotary.cos)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.gate_proj.weight"))
    error = refused(folder)
    assert "layers.1.mlp.gate_proj.weight" in error.message
    assert str(folder) in error.message
    assert error.hint


def test_an_extra_tensor_is_named(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    change_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    error = refused(folder)
    assert "layers.0.self_attn.q_norm.weight" in error.message
    assert error.hint


def test_a_tensor_under_both_of_its_names_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"norm.weight": torch.ones(32)}))
    assert "norm.weight twice" in refused(folder).message


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"lm_head.weight": torch.zeros(58, 32)}))
    assert "lm_head.weight has shape [58, 32], expected [59, 32]" in refused(folder).message


def test_a_config_of_other_sizes_is_refused(folder: Path) -> None:
    change_config(folder, num_key_value_heads=1)
    assert "k_proj.weight has shape [16, 32], expected [8, 32]" in refused(folder).message


def test_an_unsupported_family_is_named_with_those_that_are(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert "'gpt2'" in error.message
    assert "llama, mistral, qwen2, qwen3" in str(error.hint)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_run_is_named(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    change_config(folder, **changes)
    assert named in str(refused(folder))


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 2}, (5, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": 2}, (5,)),
        ({}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
        (None, {"eos_token_id": [0, 3]}, (0, 3)),
        (None, {}, ()),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    generation: dict[str, Any] | None, config: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eos_token_ids(tmp_path) == ids

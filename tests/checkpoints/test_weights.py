"""Named tensors fill a module: each exactly once, nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from peagle.checkpoints.weights import load_weights, parts_of, split_weights
from peagle.errors import HeadError, ModelError
from peagle.models.config import DecoderConfig
from peagle.models.meta import on_meta
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN, reference

CPU = torch.device("cpu")
BIASED = Qwen3Config(**UNEVEN.target | {"head_dim": 12, "attention_bias": True})


def empty(config: Any = None) -> TargetModel:
    with torch.device("meta"):
        return TargetModel(DecoderConfig.from_transformers(config or LlamaConfig(**UNEVEN.target)))


def load(module: TargetModel, tensors: Iterable[tuple[str, Tensor]], **changes: Any) -> None:
    options: dict[str, Any] = {"error": ModelError, "source": "somewhere", "dtype": torch.float32}
    load_weights(module, tensors, device=CPU, **options | changes)


def stored(config: Any = None) -> dict[str, Tensor]:
    return {
        name.removeprefix("model."): tensor
        for name, tensor in reference(config or LlamaConfig(**UNEVEN.target)).state_dict().items()
    }


@pytest.mark.parametrize("config", [LlamaConfig(**UNEVEN.target), BIASED], ids=["llama", "qwen3"])
def test_stored_names_are_those_of_transformers(config: Any) -> None:
    assert set(parts_of(empty(config))) == set(stored(config))


@pytest.mark.parametrize("config", [LlamaConfig(**UNEVEN.target), BIASED], ids=["llama", "qwen3"])
def test_splitting_gives_back_what_was_loaded(config: Any) -> None:
    tensors, module = stored(config), empty(config)
    load(module, tensors.items())
    back = split_weights(module)
    assert set(back) == set(tensors)
    for name, tensor in back.items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert not any(p.is_meta for p in module.parameters())


def test_a_module_made_on_meta_draws_no_numbers() -> None:
    state = torch.get_rng_state()
    with on_meta():
        module = torch.nn.Linear(3, 4)
        table = torch.nn.Embedding(5, 6)
    assert module.weight.is_meta
    assert module.bias.is_meta
    assert table.weight.is_meta
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.nn.Linear(3, 4).weight.is_meta


def test_every_row_of_a_fused_parameter_is_filled_by_exactly_one_part() -> None:
    module = empty(BIASED)
    rows: dict[str, list[int]] = {}
    for part in parts_of(module).values():
        rows.setdefault(part.parameter, []).extend(range(part.start, part.start + part.length))
    for name, parameter in module.named_parameters():
        assert sorted(rows[name]) == list(range(parameter.shape[0])), name


def test_order_does_not_matter() -> None:
    first, second, tensors = empty(), empty(), stored()
    load(first, tensors.items())
    load(second, reversed(tensors.items()))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_are_cast_as_they_are_loaded(dtype: torch.dtype) -> None:
    module, tensors = empty(), stored()
    load(module, tensors.items(), dtype=dtype)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert torch.equal(module.norm.weight, tensors["norm.weight"].to(dtype))


def test_tied_weights_have_one_stored_name_and_stay_tied() -> None:
    config = LlamaConfig(**UNEVEN.target | {"tie_word_embeddings": True})
    module = empty(config)
    assert "lm_head.weight" not in parts_of(module)
    tensors = stored(config)
    del tensors["lm_head.weight"]
    load(module, tensors.items())
    assert module.lm_head.weight is module.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, tensors["embed_tokens.weight"])
    assert set(split_weights(module)) == set(tensors)


@pytest.mark.parametrize(
    "name",
    ["norm.weight", "layers.2.self_attn.k_proj.weight", "layers.3.mlp.up_proj.weight"],
)
def test_a_missing_tensor_is_named(name: str) -> None:
    tensors = stored()
    del tensors[name]
    with pytest.raises(ModelError, match=f"somewhere lacks 1 of its tensors: {name}") as caught:
        load(empty(), tensors.items())
    assert caught.value.hint


def test_many_missing_tensors_are_counted() -> None:
    with pytest.raises(
        ModelError, match=r"lacks 39 of its tensors: embed_tokens.weight, layers.0.*\.\.\."
    ):
        load(empty(), [])


@pytest.mark.parametrize(
    "name", ["layers.4.mlp.up_proj.weight", "layers.0.self_attn.kv_proj.weight"]
)
def test_an_unknown_tensor_is_named(name: str) -> None:
    tensors = {**stored(), name: torch.zeros(2)}
    with pytest.raises(ModelError, match=f"unknown tensor {name}"):
        load(empty(), tensors.items())


def test_a_tensor_that_is_stored_fused_is_taken_instead_of_its_parts() -> None:
    tensors, apart, fused = stored(), empty(), empty()
    load(apart, tensors.items())
    name = "layers.0.self_attn.qkv_proj.weight"
    parts = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    together = {name: torch.cat([tensors.pop(part) for part in parts])}
    load(fused, {**tensors, **together}.items())
    assert torch.equal(fused.get_parameter(name), apart.get_parameter(name))
    with pytest.raises(ModelError, match=f"{name} twice"):
        load(empty(), {**stored(), **together}.items())


@pytest.mark.parametrize("name", ["norm.weight", "layers.1.self_attn.v_proj.weight"])
def test_a_tensor_that_comes_twice_is_named(name: str) -> None:
    tensors = stored()
    with pytest.raises(HeadError, match=f"somewhere has {name} twice"):
        load(empty(), [*tensors.items(), (name, tensors[name])], error=HeadError)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("norm.weight", (33,), "[32]"),
        ("norm.weight", (1, 32), "[32]"),
        ("norm.weight", (1,), "[32]"),
        ("norm.weight", (), "[32]"),
        ("layers.0.self_attn.k_proj.weight", (32, 32), "[16, 32]"),
        ("layers.0.self_attn.q_proj.weight", (16, 32), "[32, 32]"),
        ("layers.0.mlp.gate_proj.weight", (80, 32), "[40, 32]"),
        ("layers.0.mlp.down_proj.weight", (40, 32), "[32, 40]"),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(
    name: str, shape: tuple[int, ...], wanted: str
) -> None:
    tensors = {**stored(), name: torch.zeros(shape)}
    with pytest.raises(ModelError) as caught:
        load(empty(), tensors.items())
    assert str(caught.value) == f"somewhere: {name} has shape {list(shape)}, expected {wanted}"


def test_integers_are_not_taken_for_weights() -> None:
    tensors = {**stored(), "norm.weight": torch.ones(32, dtype=torch.int8)}
    with pytest.raises(ModelError, match=r"norm.weight is torch.int8"):
        load(empty(), tensors.items())


def test_a_failed_load_leaves_the_module_unfilled() -> None:
    module, tensors = empty(), stored()
    del tensors["norm.weight"]
    with pytest.raises(ModelError):
        load(module, tensors.items())
    assert all(p.is_meta for p in module.parameters())

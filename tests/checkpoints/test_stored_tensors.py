"""Tensors under other names, in other shapes and of few bits load as what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle.checkpoints.stored_tensors import expand_fp8, expand_mxfp4, our_name
from peagle.checkpoints.targets import load_target
from peagle.errors import ModelError
from peagle.models.target import TargetModel
from tests.tiny.families import FAMILIES
from tests.tiny.models import save_reference

CPU = torch.device("cpu")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> TargetModel:
    return load_target(folder, dtype=dtype, device=CPU)


def packed(shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of weights [E, O, I]."""
    generator = torch.Generator().manual_seed(seed)
    *outer, inputs = shape
    blocks = torch.randint(256, (*outer, inputs // 32, 16), generator=generator)
    scales = torch.randint(120, 130, (*outer, inputs // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_expanded_as_transformers_does(dtype: torch.dtype) -> None:
    blocks, scales = packed((3, 10, 64))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(expand_mxfp4(blocks, scales, dtype), theirs)


def test_an_mxfp4_checkpoint_is_the_plain_one_with_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As gpt-oss is published: experts as blocks [E, O, I / 32, 16], the rest in bfloat16."""
    config = FAMILIES["gpt-oss"](hidden_size=64, intermediate_size=96)
    model = save_reference(tmp_path, config)
    low_bit: dict[str, Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        for name, shape in (("gate_up_proj", (6, 192, 64)), ("down_proj", (6, 64, 96))):
            blocks, scales = packed(shape, seed=number)
            place = f"model.layers.{number}.mlp.experts.{name}"
            low_bit |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(plain)
    (tmp_path / "plain").mkdir()
    model.save_pretrained(tmp_path / "plain")

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in low_bit:
            tensors.pop(name.removesuffix("_blocks").removesuffix("_scales"), None)
        tensors |= low_bit

    change_tensors(tmp_path, pack)
    expanded, plain = load(tmp_path), load(tmp_path / "plain")
    for (name, ours), theirs in zip(expanded.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert "expanded" in caplog.text
    assert "float32" in caplog.text
    change_tensors(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.down_proj_scales"))
    with pytest.raises(ModelError, match="down_proj_blocks has no scales"):
        load(tmp_path)


@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40),
    block=st.sampled_from([(8, 8), (16, 4), (1, 64), (64, 64)]),
)
def test_fp8_blocks_are_multiplied_by_their_scales(
    outputs: int, inputs: int, block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(outputs * 41 + inputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    counts = -(-outputs // block[0]), -(-inputs // block[1])
    scales = torch.rand(counts, generator=generator)
    expanded = expand_fp8(weight, scales, torch.float32)
    for row in range(outputs):
        for column in range(inputs):
            scale = scales[row // block[0], column // block[1]]
            assert expanded[row, column] == weight[row, column].float() * scale


def test_an_fp8_checkpoint_is_the_plain_one_with_its_values(tmp_path: Path) -> None:
    """As Qwen3's are published: weight_scale_inv of blocks; per expert where there are any."""
    save_reference(tmp_path, FAMILIES["qwen3-moe"]())
    save_reference(tmp_path / "plain", FAMILIES["qwen3-moe"]())

    def quantise(tensors: dict[str, Tensor], *, keep_scales: bool) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            low = tensors[name].to(torch.float8_e4m3fn)
            scales = torch.rand(-(-low.shape[0] // 16), -(-low.shape[1] // 16))
            torch.manual_seed(len(name))
            if keep_scales:
                tensors |= {name: low, f"{name}_scale_inv": scales}
            else:
                tensors[name] = expand_fp8(low, scales, torch.float32)

    for folder, keep in ((tmp_path, True), (tmp_path / "plain", False)):
        torch.manual_seed(0)
        change_tensors(folder, lambda t, keep=keep: quantise(t, keep_scales=keep))
    both = zip(load(tmp_path).parameters(), load(tmp_path / "plain").parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in both)


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("model.layers.3.mlp.gate.weight", "layers.3.mlp.router.proj.weight"),
        ("model.layers.3.mlp.gate_proj.weight", "layers.3.mlp.gate_proj.weight"),
        ("model.layers.3.mlp.router.bias", "layers.3.mlp.router.proj.bias"),
        (
            "model.layers.1.block_sparse_moe.experts.5.w3.weight",
            "layers.1.mlp.experts.5.up_proj.weight",
        ),
        ("model.language_model.layers.1.router.scale", "layers.1.moe.router.scale"),
        ("language_model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_names_of_families_become_ours(stored: str, ours: str) -> None:
    assert our_name(stored) == ours


def test_the_text_model_of_a_multimodal_checkpoint_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Gemma3Config

    text = FAMILIES["gemma3"](tie_word_embeddings=True)
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    torch.manual_seed(0)
    both = Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    model = AutoModelForImageTextToText.from_config(both).eval()
    model.save_pretrained(tmp_path)
    target = load(tmp_path)
    table = model.model.language_model.embed_tokens.weight
    assert torch.equal(target.embed_tokens.weight, table)
    assert target.config.num_hidden_layers == text.num_hidden_layers

"""Tensors under other names, in other shapes and of few bits load as what they stand for."""

from __future__ import annotations

import json
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

from peagle.checkpoints import stored_tensors, targets
from peagle.checkpoints.stored_tensors import our_name
from peagle.checkpoints.targets import load_target
from peagle.errors import ModelError
from peagle.kernels.reference.experts import expand_fp8, expand_mxfp4, expanded
from peagle.models.attention import causal_attention
from peagle.models.experts import Experts, LowBitMatrices
from peagle.models.target import TargetModel
from tests.tiny.families import FAMILIES
from tests.tiny.models import save_reference
from tests.tolerance import near

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


def save_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: experts as blocks [E, O, I / 32, 16], the rest in bfloat16. In
    "plain" is the same, expanded."""
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
    say_quantised(tmp_path, {"quant_method": "mxfp4"})


def say_quantised(folder: Path, how: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def test_an_mxfp4_checkpoint_is_the_plain_one_with_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_mxfp4(tmp_path)
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


def save_fp8(tmp_path: Path, inner: int = 32) -> None:
    """As Qwen3's are published: weight_scale_inv of blocks, 16 x 16 here; per expert where there
    are any. In "plain" is the same, expanded."""
    config = FAMILIES["qwen3-moe"](moe_intermediate_size=inner)
    save_reference(tmp_path, config)
    save_reference(tmp_path / "plain", config)

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
    say_quantised(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16]})


def test_an_fp8_checkpoint_is_the_plain_one_with_its_values(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    both = zip(load(tmp_path).parameters(), load(tmp_path / "plain").parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in both)


def matrices_of(target: TargetModel) -> list[Any]:
    experts = [module for module in target.modules() if isinstance(module, Experts)]
    return [matrices for e in experts for matrices in (e.gate_up_proj, e.down_proj)]


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; what such experts then give is the reference's."""
    monkeypatch.setattr(targets, "has_low_bit_kernel", lambda form, device: True)


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("save", [save_mxfp4, save_fp8])
@torch.no_grad()
def test_experts_stay_low_bit_where_there_is_a_kernel(
    save: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are never expanded on the way."""
    save(tmp_path)

    def expand_dense(name: str, tensor: Tensor, *others: Any) -> Tensor:
        assert ".experts." not in name
        return own(name, tensor, *others)

    own = stored_tensors._expand
    monkeypatch.setattr(stored_tensors, "_expand", expand_dense)
    kept = load(tmp_path)
    plain = load(tmp_path / "plain")
    for ours, theirs in zip(matrices_of(kept), matrices_of(plain), strict=True):
        assert isinstance(ours, LowBitMatrices)
        assert ours.shape == theirs.shape
        for expert, matrix in enumerate(theirs):
            assert torch.equal(expanded(ours.weights, expert, torch.float32), matrix)
    text, places = torch.arange(9), torch.arange(9)
    outputs = [target(text, places, causal_attention(places)).hidden for target in (kept, plain)]
    torch.testing.assert_close(*outputs, **near(outputs[1], terms=96, depth=4))


@pytest.mark.usefixtures("with_kernel")
def test_low_bit_experts_keep_their_types_beside_bfloat16(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    target = load(tmp_path, torch.bfloat16)
    assert target.layers[0].self_attn.qkv_proj.weight.dtype == torch.bfloat16
    values, scales = matrices_of(target)[0].parameters()
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize(
    ("quantization", "inner"),
    [
        (None, 32),  # the config does not say so
        ({"quant_method": "mxfp4"}, 32),  # nor does the folder hold what it says
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, 24),  # gates end inside a block
        ({"quant_method": "fp8", "weight_block_size": [16, 8]}, 32),  # no kernel takes so few
        ({"quant_method": "fp8"}, 32),
    ],
)
def test_what_no_kernel_takes_is_expanded(
    quantization: dict[str, Any] | None, inner: int, tmp_path: Path
) -> None:
    save_fp8(tmp_path, inner)
    say_quantised(tmp_path, quantization)
    both = zip(load(tmp_path).parameters(), load(tmp_path / "plain").parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in both)


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("weight", ["mlp.experts.2.up_proj.weight", "self_attn.q_proj.weight"])
def test_an_fp8_weight_without_scales_is_refused(weight: str, tmp_path: Path) -> None:
    save_fp8(tmp_path)
    change_tensors(tmp_path, lambda t: t.pop(f"model.layers.1.{weight}_scale_inv"))
    with pytest.raises(ModelError, match=f"{weight} has no scales"):
        load(tmp_path)


@pytest.mark.usefixtures("with_kernel")
def test_bits_of_another_type_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    change_tensors(tmp_path, lambda t: t.update({name: t[name].float()}))
    with pytest.raises(ModelError, match=r"down_proj\.values is torch\.float32"):
        load(tmp_path)


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

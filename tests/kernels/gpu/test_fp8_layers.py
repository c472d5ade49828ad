"""A quantised model's layers run by the GPU's kernels give what their modules give."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from peagle.kernels.gpu import fp8
from peagle.kernels.gpu import layers as gpu_layers
from peagle.kernels.gpu.fp8 import Form
from peagle.kernels.reference.fp8 import Quantized
from peagle.models import fused
from peagle.models.config import DecoderConfig
from peagle.models.fp8 import quantize_linears
from peagle.models.target import TargetModel
from tests.kernels.gpu.test_layers import SIZES, aux_hidden_states_of
from tests.tiny.models import randomise
from tests.tolerance import near

EVEN = {**SIZES, "hidden_size": 32, "intermediate_size": 48}
CASES = {
    "llama": LlamaConfig(**EVEN),
    "all biases": LlamaConfig(**EVEN, attention_bias=True, mlp_bias=True),
    "norms of queries and keys": Qwen3Config(**EVEN),
}


def quantised(config: PretrainedConfig) -> TargetModel:
    model = TargetModel(DecoderConfig.from_transformers(config))
    randomise(model)
    quantize_linears(model.requires_grad_(False))
    return model


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product: equal results say nothing if the modules ran on both sides."""
    rows: list[int] = []
    run = gpu_layers.product

    def counted(quantized: Quantized, *rest: object) -> object:
        rows.append(len(quantized.values))
        return run(quantized, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_layers, "product", counted)
    return rows


def assert_near(ours: torch.Tensor, expected: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        # Sums of fewer bits, another exp and products rounded to bfloat16 (many rows) move numbers
        # across the border of two FP8 numbers, a 16th apart: two such layers were seen 5.1 % off.
        assert (ours - expected).norm() < 0.1 * expected.norm()
    else:
        torch.testing.assert_close(ours, expected, **near(expected, terms=50, depth=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [1, 2])
def test_few_quantised_rows_agree_with_their_modules(
    name: str,
    splits: int,
    device: torch.device,
    products: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantised(CASES[name])
    expected = aux_hidden_states_of(model)
    assert not products
    form = Form(16, 64, 32, 4, 2, splits=splits)
    monkeypatch.setattr(fp8, "choose_form", lambda *sizes: form)
    monkeypatch.setattr(fused, "gpu_takes", lambda x: True)
    ours = aux_hidden_states_of(model.to(device))
    assert products == [6] * 8 + [4] * 8  # four products of two layers, in two steps
    assert_near(ours, expected, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_many_quantised_rows_agree_with_their_modules(
    name: str, device: torch.device, products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(CASES[name])
    expected = aux_hidden_states_of(model)
    monkeypatch.setattr(fp8, "MAX_FEW_ROWS", 1)
    ours = aux_hidden_states_of(model.to(device))
    assert len(products) == 16
    assert_near(ours, expected, device)

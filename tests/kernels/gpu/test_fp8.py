"""Rows as 8-bit floats: the kernel against its plain twin.

Triton's interpreter does not round a number up to the next power of two when it casts to fp8, so
there the numbers need no rounding; on a GPU they are any.
"""

from __future__ import annotations

import pytest
import torch
from models import tiny
from torch import Tensor
from transformers import LlamaConfig

from kernels.gpu.test_layers import SIZES, target_taps
from peagle.kernels.gpu import layers as gpu_layers
from peagle.kernels.gpu.fp8 import quantize_rows as in_one_launch
from peagle.kernels.gpu.fp8 import scaled_linear as product_on_gpu
from peagle.kernels.plain.fp8 import LARGEST, quantize_rows, scaled_linear
from peagle.models import fused
from peagle.models.config import DecoderConfig
from peagle.models.fp8 import quantize_linears
from peagle.models.target import TargetModel


def rows_without_rounding(num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of FP8 times a power of two for each row, with the largest in each."""
    generator = torch.Generator().manual_seed(columns)
    x = 64 * torch.randn(num_rows, columns, generator=generator)
    x = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
    x[:, columns // 2] = -LARGEST
    return (x * 2.0 ** -torch.arange(num_rows)[:, None]).to(dtype)


@pytest.mark.parametrize("columns", [1, 16, 576, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_gives_its_twins_numbers(
    columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = rows_without_rounding(3, columns, dtype).to(device)
    quantized, scales = in_one_launch(x)
    expected, expected_scales = quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.float(), expected.float())
    assert torch.equal(quantized.float() * scales, x.float())


def test_rows_of_a_wider_tensor_are_read_where_they_lie(device: torch.device) -> None:
    wide = rows_without_rounding(4, 64, torch.float32).to(device)
    x = wide[:, 16:48]
    quantized, scales = in_one_launch(x)
    assert torch.equal(scales, quantize_rows(x)[1])
    assert quantized.is_contiguous()


def test_a_row_of_zeros_stays_one(device: torch.device) -> None:
    quantized, scales = in_one_launch(torch.zeros(2, 32, device=device))
    assert not quantized.float().any()
    assert torch.isfinite(scales).all()


def test_no_rows_are_no_launch(device: torch.device) -> None:
    quantized, scales = in_one_launch(torch.zeros(0, 16, device=device))
    assert quantized.shape == (0, 16)
    assert scales.shape == (0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [576, 4096, 12288])
def test_any_numbers_are_rounded_as_the_twin_does(columns: int) -> None:
    x = torch.randn(33, columns, device="cuda").to(torch.bfloat16)
    quantized, scales = in_one_launch(x)
    expected, expected_scales = quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(quantized.float(), expected.float())


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_a_number_spoils_its_row_alone(bad: float) -> None:
    x = torch.randn(3, 32, device="cuda")
    x[1, 5] = bad
    weight, scales = quantize_rows(torch.randn(16, 32, device="cuda"))
    for product in (scaled_linear, product_on_gpu):
        is_number = torch.isfinite(product(x, weight, scales)).all(dim=1)
        assert is_number.tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 300])
def test_products_agree_up_to_the_rounding_of_bfloat16(rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 576, device="cuda").to(torch.bfloat16)
    weight, scales = quantize_rows(torch.randn(960, 576, device="cuda").to(torch.bfloat16))
    bias = torch.randn(960, device="cuda").to(torch.bfloat16)
    ours, plain = (f(x, weight, scales, bias) for f in (product_on_gpu, scaled_linear))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), plain.float(), rtol=2**-6, atol=2**-4)
    alone = product_on_gpu(x[:1], weight, scales, bias)
    torch.testing.assert_close(alone.float(), plain[:1].float(), rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("attention_bias", [True, False])
def test_quantised_layers_agree_with_their_modules(
    attention_bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "attention_bias": attention_bias}
    model = TargetModel(DecoderConfig.from_transformers(LlamaConfig(**sizes)))
    tiny.randomise(model)
    quantize_linears(model.requires_grad_(False))
    expected = target_taps(model)
    # A CPU has no such product, and Triton's interpreter rounds wrongly: there the twin stands in.
    product = product_on_gpu if device.type == "cuda" else scaled_linear
    products: list[int] = []

    def counted(x: Tensor, *rest: Tensor) -> Tensor:
        products.append(len(x))
        return product(x, *rest)

    monkeypatch.setattr(gpu_layers, "scaled_linear", counted)
    monkeypatch.setattr(fused, "gpu_takes", lambda x: True)
    ours = target_taps(model.to(device))
    assert products == [6] * 8 + [4] * 8  # four products of two layers, in two steps
    if device.type == "cuda":  # bfloat16 moves a number across the border of two fp8 numbers
        assert (ours - expected).norm() < 0.05 * expected.norm()
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

"""Rows as 8-bit floats, and what goes with it in one launch: kernels against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.kernels.gpu import fp8
from peagle.kernels.reference import fp8 as reference
from peagle.kernels.reference.fp8 import FP8, LARGEST, Quantized, Sums
from peagle.kernels.reference.linear import Norm

# Triton's interpreter does not round to bfloat16, it cuts.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# It makes a number of NaN where it casts to FP8.
BAD = [torch.inf, pytest.param(torch.nan, marks=pytest.mark.gpu)]


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def assert_equal(ours: Quantized, theirs: Quantized) -> None:
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.values.float(), theirs.values.float())


@pytest.mark.parametrize("columns", [1, 16, 576, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_have_their_references_numbers(
    columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = random(5, columns, dtype=dtype, device=device, seed=columns)
    x[3] *= 100
    ours = fp8.quantize_rows(x)
    assert ours.values.dtype == FP8
    assert_equal(ours, reference.quantize_rows(x))


def test_every_number_and_every_tie_is_rounded_as_the_reference_does(device: torch.device) -> None:
    """All numbers of FP8, those just between two of them, and their neighbours on both sides."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 to LARGEST
    ties = (numbers[1:] + numbers[:-1]) / 2
    sides = [torch.nextafter(ties, ties + side) for side in (-1, 1)]
    x = torch.cat([numbers, ties, *sides]).to(device)
    x = torch.stack([x, -x])
    ours = fp8.quantize_rows(x)
    assert (ours.scales == 1).all()
    assert torch.equal(ours.values.float(), x.to(FP8).float())


def test_rows_of_a_wider_tensor_are_read_where_they_lie(device: torch.device) -> None:
    x = random(4, 64, dtype=torch.float32, device=device)[:, 16:48]
    ours = fp8.quantize_rows(x)
    assert_equal(ours, reference.quantize_rows(x))
    assert ours.values.is_contiguous()
    assert_equal(fp8.quantize_gated(x), reference.quantize_gated(x))


def test_a_row_of_zeros_stays_one(device: torch.device) -> None:
    quantized, scales = fp8.quantize_rows(torch.zeros(2, 32, device=device))
    assert not quantized.float().any()
    assert torch.isfinite(scales).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_is_not_a_number_stays_so(bad: float, device: torch.device) -> None:
    x = random(3, 32, dtype=torch.float32, device=device)
    x[1, 5] = bad
    values, scales = fp8.quantize_rows(x)
    is_number = torch.isfinite(values.float() * scales).all(dim=1)
    assert is_number.tolist() == [True, False, True]


def test_no_rows_are_no_launch(device: torch.device) -> None:
    x = torch.zeros(0, 16, device=device)
    quantized, scales = fp8.quantize_rows(x)
    assert quantized.shape == (0, 16)
    assert scales.shape == (0, 1)
    assert fp8.quantize_gated(x).values.shape == (0, 8)
    sums = Sums(x[None], None, x.dtype)
    assert fp8.quantize_normed(sums, x, Norm(x.new_ones(16), 1e-5))[1].shape == (0, 16)
    assert fp8.finish(sums, x).shape == (0, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [24, 700])
def test_a_gate_is_rounded_before_it_is_quantised(
    columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = 3 * random(4, 2 * columns, dtype=dtype, device=device)
    ours, theirs = fp8.quantize_gated(gate_up), reference.quantize_gated(gate_up)
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=2**-8, atol=0)
    # Not all: another exp moves a number across the border of two.
    assert (ours.values.float() == theirs.values.float()).float().mean() > 0.98


def sums(splits: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Sums:
    parts = random(splits, 3, 100, dtype=dtype, device=device)
    added = random(100, dtype=dtype, device=device, seed=1) if bias else None
    return Sums(parts if splits == 1 else parts.float() / 3, added, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_product_ends_as_its_reference_does(
    dtype: torch.dtype, splits: int, bias: bool, with_residual: bool, device: torch.device
) -> None:
    given = sums(splits, bias, dtype, device)
    residual = random(3, 100, dtype=dtype, device=device, seed=2) if with_residual else None
    norm = Norm(1 + 0.3 * random(100, dtype=dtype, device=device, seed=3), 1e-5)
    expected = reference.finish(given, residual)
    ours, summed = fp8.quantize_normed(given, residual, norm)
    assert torch.equal(fp8.finish(given, residual), expected)
    assert torch.equal(summed, expected)
    theirs = reference.quantize_normed(given, residual, norm)[0]
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=2**-7, atol=0)
    assert (ours.values.float() == theirs.values.float()).float().mean() > 0.98


def test_a_sum_is_normed_as_it_was_rounded(device: torch.device) -> None:
    x, residual = random(2, 40, 64, dtype=torch.float16, device=device).unbind()
    norm = Norm(1 + 0.3 * random(64, dtype=torch.float16, device=device, seed=1), 1e-5)
    given = Sums(x[None], None, x.dtype)
    ours, theirs = (
        f(given, residual, norm)[0] for f in (fp8.quantize_normed, reference.quantize_normed)
    )
    # A scale is a row's largest number: it tells one rounding more or less.
    assert (ours.scales == theirs.scales).float().mean() > 0.9


def test_a_product_that_is_whole_needs_no_launch(device: torch.device) -> None:
    given = sums(1, False, torch.float32, device)
    assert fp8.finish(given).data_ptr() == given.parts.data_ptr()


def test_a_row_has_the_same_numbers_alone_and_beside_others(device: torch.device) -> None:
    x = random(5, 200, dtype=torch.float32, device=device)
    residual = random(5, 200, dtype=torch.float32, device=device, seed=1)
    norm = Norm(random(200, dtype=torch.float32, device=device, seed=2), 1e-5)

    def normed(rows: slice) -> Quantized:
        given = Sums(x[None, rows], None, x.dtype)
        return fp8.quantize_normed(given, residual[rows], norm)[0]

    together, gated = normed(slice(0, 5)), fp8.quantize_gated(x)
    for row in range(5):
        at = slice(row, row + 1)
        assert_equal(normed(at), Quantized(*(t[at] for t in together)))
        assert_equal(fp8.quantize_gated(x[at]), Quantized(*(t[at] for t in gated)))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [4096, 12288])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_long_rows_are_rounded_as_the_reference_does(
    columns: int, rows: int, device: torch.device
) -> None:
    x = random(rows, columns, dtype=torch.bfloat16, device=device)
    assert_equal(fp8.quantize_rows(x), reference.quantize_rows(x))
    assert float(fp8.quantize_rows(x).values.float().abs().max()) == LARGEST

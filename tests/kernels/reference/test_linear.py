"""The references of products and norms equal their formulas in float64, the epsilon included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.reference import linear
from peagle.kernels.reference.linear import Norm
from tests.tolerance import near

ROWS, HIDDEN, EPS = 3, 24, 1e-2
SMALL = 1e-3  # of rows: their mean square is far below the epsilon, which alone decides the scale


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def assert_near(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, **near(exact, terms=HIDDEN))


@pytest.mark.parametrize("scale", [SMALL, 1.0])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_with_a_norm_is_the_product_of_normed_rows(scale: float, gated: bool) -> None:
    x, weight = normal(ROWS, HIDDEN, seed=0, scale=scale), 1 + normal(HIDDEN, seed=1, scale=0.3)
    matrix, bias = normal(20, HIDDEN, seed=2), normal(20, seed=3)
    residual = normal(ROWS, 10 if gated else 20, seed=4)
    ours = linear.fused_linear(
        x, matrix, bias, norm=Norm(weight, EPS), residual=residual, gated=gated
    )
    product = normed(x, weight) @ matrix.t() + bias
    if gated:
        product = F.silu(product[:, :10]) * product[:, 10:]
    assert_near(ours, product + residual)


def test_a_product_with_the_norm_of_a_row_of_zeros_is_its_bias() -> None:
    x, bias = torch.zeros(1, HIDDEN), torch.ones(4)
    ours = linear.fused_linear(
        x, torch.ones(4, HIDDEN), bias, norm=Norm(torch.ones(HIDDEN), EPS), residual=None
    )
    assert ours.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("scale", [SMALL, 1.0])
def test_norms_are_those_of_the_formula(scale: float) -> None:
    x, other = (normal(ROWS, HIDDEN, seed=n, scale=scale) for n in (0, 1))
    weight, second = (1 + normal(HIDDEN, seed=n, scale=0.3) for n in (2, 3))
    assert_near(linear.rms_norm(x, weight, EPS), normed(x, weight))
    pair = linear.norm_pair(x, other, weight, second, EPS)
    assert_near(pair, torch.cat((normed(x, weight), normed(other, second)), dim=1))
    added, summed = linear.add_rms_norm(x, other, weight, EPS)
    assert torch.equal(summed, x + other)
    assert_near(added, normed(x + other, weight))

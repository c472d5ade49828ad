"""The product of few rows agrees with torch's, and is batch-invariant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.cpu import linear as module
from peagle.kernels.cpu.linear import MAX_ROWS, LinearKernel, linear_kernel, linear_kernel_for
from peagle.models import layers
from tests.kernels.cpu.compiler import needs_kernels
from tests.tolerance import near

pytestmark = needs_kernels

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([48, 63, 64, 96, 131, 576, 960]))
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def kernel() -> LinearKernel:
    found = linear_kernel()
    assert found is not None
    return found


def operands(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(inputs, outputs, generator=generator).t()
    return torch.randn(rows, inputs, generator=generator), weight


@settings(deadline=None)
@given(st.integers(1, 40), SIZES, SIZES, st.integers(0, 99))
def test_product_agrees_with_float64(rows: int, inputs: int, outputs: int, seed: int) -> None:
    x, weight = operands(rows, inputs, outputs, seed)
    exact = x.double() @ weight.double().t()
    size = (x.double().square() @ weight.double().square().t()).sqrt()  # of sums of such terms
    ours = kernel()(x, weight).double()
    torch.testing.assert_close(ours / size, exact / size, **near(terms=inputs))


@pytest.mark.parametrize("outputs", [1, 47, 131, 960, 9000])
def test_a_row_is_batch_invariant_and_has_the_same_bits_on_any_threads(
    outputs: int, threads: int
) -> None:
    x, weight = operands(19, 100, outputs)
    torch.set_num_threads(1)
    alone = torch.cat([kernel()(row[None], weight) for row in x])
    torch.set_num_threads(threads)
    for rows in range(1, len(x) + 1):
        assert torch.equal(kernel()(x[:rows], weight), alone[:rows])
        assert torch.equal(kernel()(x[-rows:], weight), alone[-rows:])


def test_rows_may_lie_apart_or_across() -> None:
    wide, weight = operands(5, 200, 70)
    weight = weight[:, :100]
    expected = kernel()(wide[:, 50:150].contiguous(), weight)
    assert torch.equal(kernel()(wide[:, 50:150], weight), expected)
    across = wide[:, 50:150].t().contiguous().t()
    assert torch.equal(kernel()(across, weight), expected)


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = operands(3, 64, 50)
    x[1, 7], x[2, 9] = NAN, INF
    out = kernel()(x, weight)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2].isinf().all()


def test_bias_is_added() -> None:
    x, weight = operands(4, 32, 24)
    bias = torch.arange(24.0)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(layers.linear(x, weight, bias), expected, **near(expected, terms=32))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(MAX_ROWS + 1, 8), torch.ones(8, 6).t()),
        (torch.ones(2, 8), torch.ones(6, 8)),  # row-major
        (torch.ones(2, 8).double(), torch.ones(8, 6).double().t()),
        (torch.ones(8), torch.ones(8, 6).t()),
    ],
    ids=["many rows", "row-major", "float64", "vector"],
)
def test_what_does_not_fit_is_left_to_torch(x: Tensor, weight: Tensor) -> None:
    assert linear_kernel_for(x, weight) is None


@pytest.mark.usefixtures("_no_gradients")
def test_training_is_left_to_torch() -> None:
    x, weight = operands(2, 8, 6)
    with torch.inference_mode(False), torch.enable_grad():
        assert linear_kernel_for(x.clone(), weight.clone()) is None


def test_without_torchs_threads_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_on_threads", lambda: None)
    assert linear_kernel.__wrapped__() is None


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CPU_KERNELS", "0")
    assert linear_kernel.__wrapped__() is None

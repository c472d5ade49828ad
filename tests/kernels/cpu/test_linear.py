"""The product with packed weights agrees with torch's, and is batch-invariant; packed weights stand
in for the weights that they were made of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.cpu import linear as module
from peagle.kernels.cpu.linear import (
    LinearKernel,
    PackedWeight,
    linear_kernel,
    packed,
    rows_of,
    unpacked,
)
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


def operands(rows: int, inputs: int, outputs: int, seed: int = 0) -> tuple[Tensor, PackedWeight]:
    generator = torch.Generator().manual_seed(seed)
    weight = packed(torch.randn(outputs, inputs, generator=generator))
    assert isinstance(weight, PackedWeight)
    return torch.randn(rows, inputs, generator=generator), weight


@settings(deadline=None)
@given(st.integers(1, 40), SIZES, SIZES, st.integers(0, 99))
def test_product_agrees_with_float64(rows: int, inputs: int, outputs: int, seed: int) -> None:
    x, weight = operands(rows, inputs, outputs, seed)
    wide = weight.unpacked().double()
    exact = x.double() @ wide.t()
    size = (x.double().square() @ wide.square().t()).sqrt()  # of sums of such terms
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
    wide, _ = operands(5, 200, 70)
    _, weight = operands(1, 100, 70)
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
    expected = F.linear(x, weight.unpacked(), bias)
    torch.testing.assert_close(layers.linear(x, weight, bias), expected, **near(expected, terms=32))


@pytest.mark.parametrize("shape", [(8,), (2, 8), (2, 3, 8)])
def test_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(6, 8)
    expected, ours = F.linear(x, weight), layers.linear(x, packed(weight))
    torch.testing.assert_close(ours, expected, **near(expected, terms=8))
    assert layers.linear(x[None][:0], packed(weight)).shape == (0, *shape[:-1], 6)


def test_where_gradients_are_wanted_or_precision_differs_torch_computes() -> None:
    x, weight = operands(4, 32, 24)
    plain = weight.unpacked()
    with torch.inference_mode(False), torch.enable_grad():
        inputs = x.clone().requires_grad_()
        layers.linear(inputs, weight).sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(inputs.grad, plain.sum(0).expand(4, -1).clone())
    with pytest.raises(RuntimeError, match="dtype"):
        layers.linear(x.double(), weight)


@settings(deadline=None)
@given(SIZES, SIZES)
def test_a_packed_weight_holds_the_same_numbers(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs)
    ours = packed(weight)
    assert isinstance(ours, PackedWeight)
    assert ours.shape == weight.shape
    assert torch.equal(unpacked(ours), weight)


@pytest.mark.parametrize("outputs", [1, 47, 48, 131])
def test_numbers_of_bfloat16_are_stored_as_such_and_give_the_same_bits(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = torch.randn(outputs, 150).bfloat16().float(), torch.randn(11, 150)
    weight[0, 3] = INF
    half = kernel().pack(weight)
    monkeypatch.setattr(kernel(), "_fits_half", lambda *_: 0)
    whole = kernel().pack(weight)
    assert half.panels.dtype is torch.bfloat16
    assert whole.panels.dtype is torch.float32
    for rows in range(1, len(x) + 1):
        assert torch.equal(kernel()(x[:rows], half), kernel()(x[:rows], whole))
    assert torch.equal(half.unpacked(), weight)
    ids = torch.arange(outputs).flip(0)
    assert torch.equal(rows_of(half, ids), weight[ids])


def test_one_number_that_bfloat16_has_not_keeps_all_in_float32() -> None:
    weight = torch.randn(50, 20).bfloat16().float()
    weight[49, 19] += 2**-20
    assert kernel().pack(weight).panels.dtype is torch.float32


@pytest.mark.parametrize("outputs", [1, 47, 48, 131])
def test_rows_are_looked_up(outputs: int) -> None:
    weight, ids = torch.randn(outputs, 9), torch.randint(0, outputs, (3, 4))
    assert torch.equal(rows_of(packed(weight), ids), weight[ids])
    assert rows_of(packed(weight), ids[:0]).shape == (0, 4, 9)


@pytest.mark.parametrize("row", [-1, 7, 48])
def test_a_row_that_is_not_there_is_an_error(row: int) -> None:
    with pytest.raises(IndexError, match="beyond the 7"):
        rows_of(packed(torch.ones(7, 5)), torch.tensor([3, row]))


def test_each_expert_of_many_is_packed_by_itself() -> None:
    weights, x = torch.randn(3, 50, 20), torch.randn(4, 20)
    ours = packed(weights)
    assert isinstance(ours, PackedWeight)
    assert torch.equal(ours.unpacked(), weights)
    for expert, weight in enumerate(weights):
        assert torch.equal(layers.linear(x, ours.expert(expert)), layers.linear(x, packed(weight)))


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(3, 4).double()])
def test_what_the_kernel_does_not_read_is_not_packed(tensor: Tensor) -> None:
    assert packed(tensor) is tensor


def test_without_torchs_threads_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_on_threads", lambda: None)
    assert linear_kernel.__wrapped__() is None


def test_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CPU_KERNELS", "0")
    assert linear_kernel.__wrapped__() is None

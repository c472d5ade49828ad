"""Each row times its expert's low-bit weight: the kernel against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu import experts
from peagle.kernels.gpu.experts import Form, grouped_linear, grouped_product, num_programs
from peagle.kernels.reference import experts as reference
from peagle.kernels.reference.experts import MXFP4, LowBitForm, LowBitWeights
from peagle.kernels.reference.fp8 import FP8
from tests.tolerance import near, rounding

KINDS = {"mxfp4": MXFP4, "fp8": LowBitForm("fp8", 32, 32), "fp8 outputs": LowBitForm("fp8", 1, 64)}
every_kind = pytest.mark.parametrize("kind", KINDS)
FORMS = [Form(16, 32, 4, 2), Form(64, 64, 4, 3)]


def make_weights(
    kind: str, shape: tuple[int, int, int], device: torch.device, seed: int = 0
) -> LowBitWeights:
    generator, form = torch.Generator().manual_seed(seed), KINDS[kind]
    (values_shape, _), (scales_shape, _) = form.values_of(shape), form.scales_of(shape)
    if form.kind == "mxfp4":
        values = torch.randint(256, values_shape, generator=generator).to(torch.uint8)
        scales = torch.randint(120, 130, scales_shape, generator=generator).to(torch.uint8)
    else:
        values = torch.randn(values_shape, generator=generator).to(FP8)
        scales = 0.5 + torch.rand(scales_shape, generator=generator)
    return LowBitWeights(values.to(device), scales.to(device), form)


class Case:
    """`counts`: how many rows each expert has."""

    def __init__(
        self,
        kind: str,
        counts: Sequence[int],
        outputs: int,
        inputs: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.weights = make_weights(kind, (len(counts), outputs, inputs), device)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(sum(counts), inputs, generator=generator).to(device, dtype)
        self.bias = torch.randn(len(counts), outputs, generator=generator).to(device, dtype)
        self.ends = torch.tensor(counts, device=device).cumsum(0)

    def ours(self, form: Form | None = None, bias: Tensor | None = None) -> Tensor:
        if form is None:
            return grouped_linear(self.x, self.weights, bias, self.ends)
        return grouped_product(self.x, self.weights, bias, self.ends, form)

    def theirs(self, bias: Tensor | None = None) -> Tensor:
        return reference.grouped_linear(self.x, self.weights, bias, self.ends)


@every_kind
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"),
    [([3, 0, 17, 1], 40, 96), ([0, 0, 5], 64, 160), ([1], 33, 64)],
)
def test_a_row_is_multiplied_with_its_experts_weight(
    kind: str, form: Form, counts: list[int], outputs: int, inputs: int, device: torch.device
) -> None:
    case = Case(kind, counts, outputs, inputs, device)
    for bias in (None, case.bias):
        expected = case.theirs(bias)
        torch.testing.assert_close(case.ours(form, bias), expected, **near(expected, terms=inputs))


@every_kind
def test_the_reference_is_the_product_with_expanded_weights(kind: str) -> None:
    case = Case(kind, [2, 1], 40, 96, torch.device("cpu"))
    for row, expert in enumerate((0, 0, 1)):
        matrix = reference.expanded(case.weights, expert, torch.float64)
        expected = (matrix @ case.x[row].double() + case.bias[expert].double()).float()
        found = case.theirs(case.bias)[row]
        torch.testing.assert_close(found, expected, **near(expected, terms=96))


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_value_and_scale_is_the_references_to_the_bit(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    """One input at a time: sums of a single number are exact. Each 4-bit value is there."""
    case = Case(kind, [64, 64], 32, 64, device)
    case.x = torch.eye(64, dtype=dtype, device=device).repeat(2, 1)
    if kind == "mxfp4":
        case.weights.values[0, 0] = torch.arange(32, device=device) * 8 + 1
        case.weights.values[0, 1] = torch.arange(32, device=device) * 8 + 134
    assert torch.equal(case.ours(), case.theirs())


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@every_kind
def test_half_precision_is_summed_in_float32(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    case = Case(kind, [4, 9], 64, 192, device, dtype)
    ours, theirs = case.ours(bias=case.bias), case.theirs(case.bias)
    assert ours.dtype == dtype
    # Both round once; float32 sums of another order may round to the other side.
    assert (ours.float() - theirs.float()).norm() < rounding(terms=1, dtype=dtype) * ours.norm()


@every_kind
def test_a_row_has_the_same_bits_alone_and_beside_others(kind: str, device: torch.device) -> None:
    case = Case(kind, [5, 3], 40, 96, device)
    together = case.ours(bias=case.bias)
    for row, expert in ((0, 0), (3, 0), (6, 1)):
        alone = Case(kind, [int(expert == 0), int(expert == 1)], 40, 96, device)
        alone.x = case.x[row : row + 1]
        assert torch.equal(alone.ours(bias=case.bias), together[row : row + 1])


def test_what_is_not_a_number_spoils_its_row_alone(device: torch.device) -> None:
    case = Case("mxfp4", [2, 2], 32, 64, device)
    case.x[1, 5] = torch.nan
    assert torch.isfinite(case.ours()).all(dim=1).tolist() == [True, False, True, True]


def test_no_rows_are_no_launch(device: torch.device) -> None:
    assert Case("mxfp4", [0, 0], 32, 64, device).ours().shape == (0, 32)


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=9), block=st.sampled_from([16, 64]))
def test_there_are_programs_for_every_routing_and_not_one_too_many(
    counts: list[int], block: int
) -> None:
    rows = sum(counts)
    most = num_programs(rows, len(counts), block)
    assert sum(-(-count // block) for count in counts) <= most
    # Reached: single rows everywhere, then whole blocks.
    alone = min(rows, len(counts))
    assert most == alone + (rows - alone) // block


def test_one_form_up_to_sixteen_rows_for_each_expert() -> None:
    def form(rows: int) -> Form:
        return experts.choose_form(rows, 32, torch.bfloat16)

    assert form(1) == form(16 * 32) != form(16 * 32 + 1)
    assert form(10**6).rows > form(16 * 32 + 1).rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_a_graph_follows_the_router(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """Who has how many rows changes behind the graph's back."""
    case = Case(kind, [100, 0, 28], 128, 256, device, dtype)
    case.ours()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.ours()
    for counts in ([0, 128, 0], [1, 64, 63]):
        case.ends.copy_(torch.tensor(counts).cumsum(0))
        graph.replay()
        torch.testing.assert_close(out, case.theirs(), rtol=2**-7, atol=2**-4)

"""Products of few rows with 8-bit weights: every form against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.kernels.gpu import fp8
from peagle.kernels.gpu.fp8 import Form, few_rows_product
from peagle.kernels.reference import fp8 as reference
from tests.kernels.gpu.test_fp8 import BAD
from tests.tolerance import near

FORMS = {
    "whole": Form(16, 64, 32, 4, 2),
    "in parts": Form(16, 64, 32, 4, 2, splits=3),
    "more parts than turns": Form(16, 64, 64, 4, 2, splits=4),
    "more rows": Form(32, 64, 32, 4, 3, splits=2),
    "more outputs": Form(64, 128, 64, 4, 2),
}
SHAPES_OF_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
SHARED_MEMORY = 99 * 1024  # bytes of a program on GPUs of capability 8.9


class Case:
    def __init__(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        signs_alone: bool = False,  # a row's numbers have one size: no sum needs many bits
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows + outputs)
        x, weight, bias = (
            torch.randn(*shape, generator=generator, device=device).to(dtype)
            for shape in ((rows, inputs), (outputs, inputs), (outputs,))
        )
        if signs_alone:
            x, weight = (t.sign() * t[:, :1].abs() for t in (x, weight))
        self.x, self.bias, self.dtype = x, bias, dtype
        self.weight, self.scales = reference.quantize_rows(weight)

    def ours(self, form: Form, bias: Tensor | None, rows: slice = slice(None)) -> Tensor:
        quantized = reference.quantize_rows(self.x[rows])
        sums = few_rows_product(quantized, self.weight, self.scales, bias, self.dtype, form)
        return fp8.finish(sums)

    def theirs(self, bias: Tensor | None) -> Tensor:
        return reference.scaled_linear(self.x, self.weight, self.scales, bias)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """The interpreter sums in float32, as the reference; Hopper's 8-bit units keep some 14 bits."""
    if ours.is_cuda:
        assert (ours - theirs).norm() < 2**-9 * theirs.norm()
    else:
        torch.testing.assert_close(ours, theirs, **near(theirs, terms=112))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 96), (48, 112), (80, 16)])
@pytest.mark.parametrize("rows", [1, 16])
def test_every_form_agrees_with_the_reference(
    name: str, rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    case = Case(rows, outputs, inputs, device)
    for bias in (None, case.bias):
        assert_near(case.ours(FORMS[name], bias), case.theirs(bias))


@pytest.mark.gpu
def test_what_32_inputs_give_is_added_in_float32(device: torch.device) -> None:
    x, weight = torch.ones(1, 4096, device=device), torch.ones(64, 4096, device=device)
    x[:, 32:] /= 64  # such a product, a 2**17th of the first 32, is lost beside a sum of 14 bits
    weight[:, 32:] /= 64
    out = fp8.scaled_linear(x, *reference.quantize_rows(weight))
    expected = torch.full_like(out, 32 + 4064 / 64**2)
    torch.testing.assert_close(out, expected, **near(terms=4096 // 32))


@pytest.mark.parametrize("name", ["whole", "in parts"])
def test_a_product_is_rounded_before_its_bias_and_after_it(name: str, device: torch.device) -> None:
    case = Case(16, 64, 96, device, torch.float16, signs_alone=True)
    ours, theirs = case.ours(FORMS[name], case.bias), case.theirs(case.bias)
    assert ours.dtype == torch.float16
    # Not all: float32 sums of another order may round to the other side.
    assert (ours == theirs).float().mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_row_has_the_same_bits_alone_and_beside_others(name: str, device: torch.device) -> None:
    case = Case(16, 48, 112, device)
    together = case.ours(FORMS[name], case.bias)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(15, 16)):
        assert torch.equal(case.ours(FORMS[name], case.bias, rows), together[rows])


@pytest.mark.parametrize("rows", [1, 20, 40])
def test_scaled_linear_agrees_with_the_reference(rows: int, device: torch.device) -> None:
    case = Case(rows, 48, 144, device)
    arguments = (case.x, case.weight, case.scales, case.bias)
    ours, theirs = fp8.scaled_linear(*arguments), reference.scaled_linear(*arguments)
    assert_near(ours, theirs)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_a_number_spoils_its_row_alone(bad: float, device: torch.device) -> None:
    case = Case(3, 16, 32, device)
    case.x[1, 5] = bad
    for product in (fp8.scaled_linear, reference.scaled_linear):
        is_number = torch.isfinite(product(case.x, case.weight, case.scales)).all(dim=1)
        assert is_number.tolist() == [True, False, True]


def test_no_rows_give_no_rows(device: torch.device) -> None:
    case = Case(0, 48, 32, device)
    assert fp8.scaled_linear(case.x, case.weight, case.scales, case.bias).shape == (0, 48)


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES_OF_8B, (960, 576), (576, 1536)])
def test_up_to_sixteen_rows_have_one_form(outputs: int, inputs: int) -> None:
    assert len({fp8.choose_form(rows, outputs, inputs) for rows in range(1, 17)}) == 1


@pytest.mark.parametrize(
    ("rows", "splits"), [(1, [4, 4, 1, 6]), (32, [4, 4, 1, 6]), (33, [2, 4, 1, 4])]
)
def test_inputs_are_divided_as_was_measured_to_be_best(rows: int, splits: list[int]) -> None:
    assert [fp8.choose_form(rows, *shape).splits for shape in SHAPES_OF_8B] == splits


@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES_OF_8B, (960, 576), (8192, 28672)])
@pytest.mark.parametrize("rows", [1, 17, 33, 64])
def test_a_form_holds_all_rows_and_fits_the_memory(rows: int, outputs: int, inputs: int) -> None:
    form = fp8.choose_form(rows, outputs, inputs)
    assert rows <= form.rows
    turn = form.inputs * (form.outputs + form.rows)  # bytes of one turn of the loop
    assert turn * form.stages <= SHARED_MEMORY


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES_OF_8B)
@pytest.mark.parametrize("rows", [1, 32, 64])
def test_every_multiprocessor_has_a_program_and_an_equal_part(
    rows: int, outputs: int, inputs: int
) -> None:
    form = fp8.choose_form(rows, outputs, inputs)
    assert outputs // form.outputs * form.splits >= 132
    assert inputs % (form.splits * form.inputs) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 17, 64, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), *SHAPES_OF_8B])
def test_products_agree_up_to_the_rounding_of_bfloat16(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    case = Case(rows, outputs, inputs, device, torch.bfloat16)
    ours = fp8.scaled_linear(case.x, case.weight, case.scales, case.bias).float()
    exact = case.theirs(case.bias).float()
    assert (ours - exact).norm() < 2**-7 * exact.norm()
    torch.testing.assert_close(ours, exact, rtol=2**-6, atol=2**-8 * inputs**0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), *SHAPES_OF_8B])
def test_a_bfloat16_row_has_the_same_bits_alone_and_beside_others(
    outputs: int, inputs: int, device: torch.device
) -> None:
    case = Case(16, outputs, inputs, device, torch.bfloat16)
    together = fp8.scaled_linear(case.x, case.weight, case.scales)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(15, 16)):
        alone = fp8.scaled_linear(case.x[rows], case.weight, case.scales)
        assert torch.equal(alone, together[rows])

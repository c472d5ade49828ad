"""The products, norms and gates of few and of many rows agree with their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.gpu import linear as gpu
from peagle.kernels.gpu import norms
from peagle.kernels.reference import linear as reference
from peagle.kernels.reference.linear import Norm
from tests.tolerance import near, rounding

HALF_STEP = {torch.float32: rounding(terms=256), torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def operands(
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
    norm: bool = False,
    residual: bool = False,
    gated: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def draw(*shape: int, seed: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    results = outputs // 2 if gated else outputs
    weight = draw(outputs, inputs, seed=1) * inputs**-0.5
    options = {
        "norm": Norm(1 + 0.3 * draw(inputs, seed=2), 1e-5) if norm else None,
        "residual": draw(rows, results, seed=3) if residual else None,
        "gated": gated,
    }
    return (draw(rows, inputs, seed=0), weight, draw(outputs, seed=4) if bias else None), options


def assert_agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == theirs.dtype
    step = HALF_STEP[dtype]
    torch.testing.assert_close(ours, theirs, rtol=step, atol=step)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (50, 136), (16, 256)])
@pytest.mark.parametrize("extras", [False, True])
def test_every_size_agrees_with_the_reference(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int, extras: bool
) -> None:
    names = dict.fromkeys(("bias", "norm", "residual", "gated"), extras)
    args, options = operands(rows, outputs, inputs, dtype, device, **names)
    ours = gpu.fused_linear(*args, **options)
    assert_agree(ours, reference.fused_linear(*args, **options), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("number", range(16))
def test_every_combination_of_extras_agrees_with_the_reference(
    device: torch.device, number: int, out_dtype: torch.dtype | None
) -> None:
    names = ("bias", "norm", "residual", "gated")
    chosen = {name: bool(number >> bit & 1) for bit, name in enumerate(names)}
    args, options = operands(5, 40, 72, torch.float16, device, **chosen)
    ours = gpu.fused_linear(*args, **options, out_dtype=out_dtype)
    theirs = reference.fused_linear(*args, **options, out_dtype=out_dtype)
    # The roundings inside are the same; what is left is the order of the sums.
    assert_agree(ours, theirs, torch.float16)


def test_a_float32_result_of_half_operands_is_not_rounded(device: torch.device) -> None:
    args, options = operands(4, 32, 64, torch.float16, device)
    ours = gpu.fused_linear(*args, **options, out_dtype=torch.float32)
    exact = (args[0].double() @ args[1].double().t()).float()
    torch.testing.assert_close(ours, exact, **near(exact, terms=64))
    assert not torch.equal(ours, ours.half().float())


def share_of_equal_bits(ours: Tensor, theirs: Tensor) -> float:
    return float((ours == theirs).float().mean())


@pytest.mark.parametrize("scale", [1.0, 0.003])  # beside small rows the epsilon counts
def test_a_norm_is_rounded_before_its_weight_and_after_it(
    device: torch.device, scale: float
) -> None:
    x = scale * random(16, 64, dtype=torch.float16, device=device)
    norm = Norm(1 + 0.3 * random(64, dtype=torch.float16, device=device, seed=1), 1e-5)
    # Not all: float32 sums of another order may round to the other side.
    assert share_of_equal_bits(norms.rms_norm(x, *norm), reference.rms_norm(x, *norm)) > 0.99


@pytest.mark.parametrize("scale", [1.0, 0.003])
def test_a_products_norm_has_its_weight_before_and_its_scale_after_the_sums(
    device: torch.device, scale: float
) -> None:
    x = scale * random(16, 64, dtype=torch.float16, device=device)
    norm = Norm(1 + 0.3 * random(64, dtype=torch.float16, device=device, seed=1), 1e-5)
    identity = torch.eye(64, dtype=torch.float16, device=device)
    product = gpu.fused_linear(x, identity, None, norm=norm, residual=None, out_dtype=torch.float32)
    root = (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = (x * norm.weight).float() * root
    torch.testing.assert_close(product, expected, **near(expected, terms=64))
    torch.testing.assert_close(product, reference.rms_norm(x, *norm).float(), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_pair_of_norms_stands_side_by_side(device: torch.device, dtype: torch.dtype) -> None:
    first, second = (random(5, 40, dtype=dtype, device=device, seed=n) for n in (1, 2))
    weights = [1 + 0.3 * random(40, dtype=dtype, device=device, seed=n) for n in (3, 4)]
    arguments = (first, second, *weights, 1e-5)
    ours = norms.norm_pair(*arguments)
    torch.testing.assert_close(ours, reference.norm_pair(*arguments), rtol=2e-3, atol=1e-5)
    torch.testing.assert_close(ours[:, 40:], norms.rms_norm(second, weights[1], 1e-5))


def test_bias_gate_and_residual_are_rounded_once(device: torch.device) -> None:
    names = {"bias": True, "residual": True}
    for gated in (False, True):
        args, options = operands(16, 64, 32, torch.float16, device, **names, gated=gated)
        ours, theirs = gpu.fused_linear(*args, **options), reference.fused_linear(*args, **options)
        assert share_of_equal_bits(ours, theirs) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_alone_and_beside_others(
    device: torch.device, dtype: torch.dtype, gated: bool
) -> None:
    names = {"bias": True, "norm": True, "residual": True, "gated": gated}
    (x, weight, bias), options = operands(16, 40, 136, dtype, device, **names)
    together = gpu.fused_linear(x, weight, bias, **options)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(15, 16)):
        part = options | {"residual": options["residual"][rows]}
        assert torch.equal(gpu.fused_linear(x[rows], weight, bias, **part), together[rows])


def test_rows_that_lie_apart_are_read_in_place(device: torch.device) -> None:
    wide = random(3, 2, 40, dtype=torch.float32, device=device)
    weight = random(24, 40, dtype=torch.float32, device=device, seed=1)
    ours = gpu.fused_linear(wide[:, 1], weight, None, norm=None, residual=None)
    assert_agree(ours, wide[:, 1] @ weight.t(), torch.float32)


def test_no_rows_give_no_rows(device: torch.device) -> None:
    args, options = operands(0, 24, 40, torch.float32, device)
    assert gpu.fused_linear(*args, **options).shape == (0, 24)
    assert norms.rms_norm(args[0], args[1][0], 1e-5).shape == (0, 40)
    assert norms.silu_mul(args[0]).shape == (0, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [40, 576, 5000])
def test_norms_agree_with_their_references(
    device: torch.device, dtype: torch.dtype, columns: int
) -> None:
    x, residual = random(2, 3, columns, dtype=dtype, device=device).unbind()
    weight = 1 + 0.3 * random(columns, dtype=dtype, device=device, seed=1)
    assert_agree(norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    ours = norms.add_rms_norm(x, residual, weight, 1e-5)
    theirs = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_agree(ours[0], theirs[0], dtype)
    assert torch.equal(ours[1], theirs[1])


def test_a_sum_is_normed_as_it_was_rounded(device: torch.device) -> None:
    x, residual = random(2, 8, 576, dtype=torch.float16, device=device).unbind()
    weight = torch.ones(576, dtype=torch.float16, device=device)
    normed, summed = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert share_of_equal_bits(normed, reference.rms_norm(summed, weight, 1e-5)) > 0.99


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (49152, 576), (24576, 4096)])
def test_up_to_sixteen_rows_have_one_tile(outputs: int, inputs: int, gated: bool) -> None:
    tiles = {gpu.tile(rows, outputs, inputs, gated, 2) for rows in range(1, 17)}
    assert len(tiles) == 1


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [20, 1500])
def test_the_gate_agrees_with_its_reference(
    device: torch.device, dtype: torch.dtype, columns: int
) -> None:
    gate_up = 3 * random(3, 2 * columns, dtype=dtype, device=device)
    gate_up[0, 0] = -60000.0  # exp(60000) is infinite, and the gate must still be zero
    assert_agree(norms.silu_mul(gate_up), reference.silu_mul(gate_up), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (3072, 576), (576, 1536), (64, 12288)])
def test_bfloat16_agrees_with_the_reference(
    device: torch.device, rows: int, outputs: int, inputs: int, gated: bool
) -> None:
    names = {"bias": True, "norm": True, "residual": True, "gated": gated}
    args, options = operands(rows, outputs, inputs, torch.bfloat16, device, **names)
    ours = gpu.fused_linear(*args, **options)
    assert_agree(ours, reference.fused_linear(*args, **options), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [40, 960, 49152])
def test_a_bfloat16_row_has_the_same_bits_alone_and_beside_others(
    device: torch.device, outputs: int
) -> None:
    (x, weight, _), options = operands(16, outputs, 576, torch.bfloat16, device, norm=True)
    together = gpu.fused_linear(x, weight, None, **options, out_dtype=torch.float32)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9), slice(15, 16)):
        alone = gpu.fused_linear(x[rows], weight, None, **options, out_dtype=torch.float32)
        assert torch.equal(alone, together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_vocabulary_of_bfloat16_gives_float32_sums(device: torch.device, rows: int) -> None:
    (x, weight, _), options = operands(rows, 49152, 576, torch.bfloat16, device)
    ours = gpu.fused_linear(x, weight, None, **options, out_dtype=torch.float32)
    torch.testing.assert_close(ours, x.float() @ weight.float().t(), **near(terms=576))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [576, 8192, 12288])
def test_bfloat16_norms_and_gates_agree_with_their_references(
    device: torch.device, columns: int
) -> None:
    x, residual = random(2, 70, columns, dtype=torch.bfloat16, device=device).unbind()
    weight = 1 + 0.3 * random(columns, dtype=torch.bfloat16, device=device, seed=1)
    theirs = reference.add_rms_norm(x, residual, weight, 1e-5)
    for mine, expected in zip(norms.add_rms_norm(x, residual, weight, 1e-5), theirs, strict=True):
        assert_agree(mine, expected, torch.bfloat16)
    assert_agree(
        norms.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), torch.bfloat16
    )
    assert_agree(norms.silu_mul(x), reference.silu_mul(x), torch.bfloat16)

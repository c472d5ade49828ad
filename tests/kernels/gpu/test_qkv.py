"""Queries, keys and values in one launch are those of the product and the rotation behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.gpu import layers as gpu_layers
from peagle.kernels.gpu.linear import fused_linear
from peagle.kernels.gpu.qkv import fits_one_kernel, qkv_to_cache, rotate_and_write
from peagle.kernels.layer_tensors import LayerTensors, Projection
from peagle.kernels.reference import qkv as reference
from peagle.kernels.reference.linear import Norm
from peagle.kernels.rows import PagedRows, RowGroups
from tests.kernels.gpu.paged_cases import (
    DEVICE,
    EPS,
    NUM_POSITIONS,
    TOLERANCE,
    UNTOUCHED,
    Heads,
    Item,
    Shape,
    make_rows,
)

SMALL = Heads(3, 1, 32)
SHARED = Heads(4, 2, 16)


@dataclass(frozen=True)
class Case:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm: Norm | None
    rows: PagedRows
    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor

    def run(self, function: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """-> q, and what the function made of copies of the cache, without the padding slot."""
        cache = {"keys": self.keys.clone(), "values": self.values.clone()}
        rotation = {"cos": self.cos, "sin": self.sin}
        operands = self.x, self.weight, self.bias
        q = function(*operands, norm=self.norm, rows=self.rows, **rotation, **cache)
        return q, cache["keys"][:-1], cache["values"][:-1]


def two_kernels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    norm: Norm | None,
    rows: PagedRows,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    qkv = fused_linear(x, weight, bias, norm=norm, residual=None)
    return rotate_and_write(qkv, rows, cos, sin, None, None, EPS, keys, values)


def make_case(
    num_rows: int,
    heads: Heads = SMALL,
    inputs: int = 40,
    dtype: torch.dtype = torch.float32,
    *,
    norm: bool = False,
    bias: bool = False,
) -> Case:
    """Every third row only fills up: its slot is the padding slot."""
    draws = torch.Generator().manual_seed(num_rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws).to(DEVICE, dtype)

    num_slots = 2 * num_rows + 2
    slots = torch.randperm(num_slots - 1, generator=draws)[:num_rows]
    slots[2::3] = num_slots - 1
    rows = make_rows(
        Shape((Item(0, 0),) * num_rows, 1),
        torch.zeros(1, 1),
        torch.zeros(num_rows),
        positions=torch.randint(NUM_POSITIONS, (num_rows,), generator=draws).to(DEVICE),
        slots=slots.to(DEVICE),
    )
    turn = torch.outer(torch.arange(NUM_POSITIONS), 100.0 ** -torch.linspace(0, 1, heads.dim // 2))
    outputs = (heads.q + 2 * heads.kv) * heads.dim
    cache = torch.full((2, num_slots, heads.kv, heads.dim), UNTOUCHED, dtype=dtype, device=DEVICE)
    return Case(
        draw(num_rows, inputs),
        draw(outputs, inputs) * inputs**-0.5,
        draw(outputs) if bias else None,
        Norm(1 + 0.3 * draw(inputs), EPS) if norm else None,
        rows,
        torch.cat((turn.cos(), turn.cos()), -1).to(DEVICE),
        torch.cat((-turn.sin(), turn.sin()), -1).to(DEVICE),
        *cache.unbind(),
    )


def assert_agrees_with_the_reference(case: Case) -> None:
    ours, references = case.run(qkv_to_cache), case.run(reference.qkv_to_cache)
    assert ours[0].is_contiguous()
    for our, expected in zip(ours, references, strict=True):
        assert our.dtype == expected.dtype
        torch.testing.assert_close(our, expected, **TOLERANCE[our.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 5, 17, 30])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_kernel_agrees_with_its_reference(
    num_rows: int, norm: bool, bias: bool, dtype: torch.dtype
) -> None:
    assert_agrees_with_the_reference(make_case(num_rows, dtype=dtype, norm=norm, bias=bias))


@pytest.mark.slow
@pytest.mark.parametrize(
    "heads", [SHARED, Heads(9, 3, 16), Heads(1, 1, 64), Heads(2, 1, 48)], ids=str
)
def test_every_layout_of_heads_agrees_with_the_reference(heads: Heads) -> None:
    assert_agrees_with_the_reference(make_case(5, heads, norm=True, bias=True))


def test_a_drafters_first_layer_reads_two_inputs_side_by_side() -> None:
    assert_agrees_with_the_reference(make_case(5, SHARED, inputs=2 * 72))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [5, 30])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_have_the_order_of_the_two_kernels(
    num_rows: int, extras: bool, dtype: torch.dtype
) -> None:
    """In the interpreter, where every operation is rounded by itself, to the bit."""
    if DEVICE.type == "cuda":
        pytest.skip("a compiler may join a product and a sum in one kernel and not in another")
    case = make_case(num_rows, inputs=136, dtype=dtype, norm=extras, bias=extras)
    for ours, theirs in zip(case.run(qkv_to_cache), case.run(two_kernels), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_that_are_not_real_touch_the_padding_slot_alone() -> None:
    case = make_case(17)
    _, keys, values = case.run(qkv_to_cache)
    written = torch.zeros(len(keys) + 1, dtype=torch.bool, device=DEVICE)
    written[case.rows.slots] = True
    assert written[:-1].sum() == 12  # of 17 rows five go to the padding slot
    for cache in keys, values:
        assert (cache[~written[:-1]] == UNTOUCHED).all()
        assert (cache[written[:-1]] != UNTOUCHED).all()


@pytest.mark.slow
def test_a_row_has_the_same_bits_alone_or_beside_others() -> None:
    case = make_case(5, norm=True)
    together, keys, _ = case.run(qkv_to_cache)
    for row in range(5):
        own = slice(row, row + 1)
        rows = case.rows._replace(positions=case.rows.positions[own], slots=case.rows.slots[own])
        alone = Case(
            case.x[own], case.weight, case.bias, case.norm, rows, case.cos, case.sin,
            case.keys, case.values,
        ).run(qkv_to_cache)  # fmt: skip
        assert torch.equal(alone[0], together[own])
        if (slot := int(rows.slots)) < len(keys):
            assert torch.equal(alone[1][slot], keys[slot])


def test_no_rows_are_no_launch() -> None:
    case = make_case(1)
    none = case.rows._replace(positions=case.rows.positions[:0], slots=case.rows.slots[:0])
    q = qkv_to_cache(
        case.x[:0], case.weight, None, norm=None, rows=none, cos=case.cos, sin=case.sin,
        keys=case.keys, values=case.values,
    )  # fmt: skip
    assert q.shape == (0, 3, 32)


def layer_of(case: Case, heads: Heads, head_norms: bool) -> LayerTensors:
    hidden, inner, dtype = case.x.shape[1], 24, case.x.dtype

    def ones(*shape: int) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=DEVICE)

    head_norm = ones(heads.dim) if head_norms else None
    return LayerTensors(
        input_norm=ones(hidden),
        post_norm=ones(hidden),
        q_norm=head_norm,
        k_norm=head_norm,
        qkv=Projection(case.weight, case.bias),
        o=Projection(ones(hidden, heads.q * heads.dim), None),
        gate_up=Projection(ones(2 * inner, hidden), None),
        down=Projection(ones(hidden, inner), None),
        window=None,
        eps=EPS,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "head_norms", "num_rows", "expected"),
    [
        (SMALL, False, 5, "one kernel"),
        (SMALL, False, 32, "one kernel"),
        (SMALL, False, 33, "two kernels"),  # that many are quicker so
        (SMALL, True, 5, "two kernels"),  # a head's norm needs all of it
        (Heads(3, 1, 8), False, 5, "two kernels"),  # a tile would be of two heads
        (Heads(3, 1, 24), False, 5, "two kernels"),
    ],
)
def test_layers_take_the_kernel_that_fits(
    heads: Heads, head_norms: bool, num_rows: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(num_rows, heads)
    layer = layer_of(case, heads, head_norms)
    assert fits_one_kernel(layer, case.x, heads.dim) == (expected == "one kernel")
    called: list[str] = []

    def noted(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def note(*args: Any, **options: Any) -> Tensor:
            called.append(name)
            return function(*args, **options)

        return note

    monkeypatch.setattr(gpu_layers, "qkv_to_cache", noted("one kernel", qkv_to_cache))
    monkeypatch.setattr(gpu_layers, "rotate_and_write", noted("two kernels", rotate_and_write))
    cache = case.keys[None], case.values[None]
    rows = RowGroups(case.rows.positions, case.rows.slots, [case.rows])
    gpu_layers.run_layers([layer], case.x, None, case.cos, case.sin, [rows], *cache)
    assert called == [expected]


@pytest.mark.parametrize("function", [qkv_to_cache, two_kernels])
def test_a_slots_heads_may_be_the_beginning_of_a_wider_row(function: Callable[..., Tensor]) -> None:
    case = make_case(5, SHARED)
    expected = case.run(function)
    wide = torch.full((2, len(case.keys), 3, 16), UNTOUCHED, device=DEVICE)
    keys, values = wide[:, :, :2].unbind()
    operands = {"norm": case.norm, "rows": case.rows, "cos": case.cos, "sin": case.sin}
    q = function(case.x, case.weight, case.bias, **operands, keys=keys, values=values)
    for ours, theirs in zip((q, keys[:-1], values[:-1]), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert (wide[:, :, 2] == UNTOUCHED).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 22, 64, 256])
@pytest.mark.parametrize(("inputs", "norm"), [(576, True), (576, False), (1152, False)])
def test_bf16_agrees_with_the_two_kernels_at_realistic_sizes(
    num_rows: int, inputs: int, norm: bool
) -> None:
    case = make_case(num_rows, Heads(9, 3, 64), inputs, torch.bfloat16, norm=norm)
    ours = case.run(qkv_to_cache)
    for our, theirs in zip(ours, case.run(two_kernels), strict=True):
        assert (our == theirs).double().mean() > 0.98  # of others a last bit was rounded otherwise
        torch.testing.assert_close(our, theirs, atol=2e-2, rtol=1e-2)
    for our, expected in zip(ours, case.run(reference.qkv_to_cache), strict=True):
        torch.testing.assert_close(our, expected, atol=5e-2, rtol=2e-2)

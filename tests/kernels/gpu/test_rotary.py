"""Norm, rotation and cache write: kernel and reference agree, and the modules with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu.qkv import rotate_and_write
from peagle.kernels.reference import qkv as reference
from peagle.kernels.rows import PagedRows
from peagle.models.layers import RMSNorm, rotate
from tests.kernels.gpu.paged_cases import (
    DEVICE,
    EPS,
    EXAMPLES,
    NUM_POSITIONS,
    TOLERANCE,
    UNTOUCHED,
    Heads,
    Item,
    Shape,
    make_rows,
)


@dataclass(frozen=True)
class Case:
    qkv: Tensor
    rows: PagedRows
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    keys: Tensor
    values: Tensor

    def run(self, function: object) -> tuple[Tensor, Tensor, Tensor]:
        """-> q, and what the function made of copies of the cache, without the padding slot."""
        keys, values = self.keys.clone(), self.values.clone()
        q = function(  # type: ignore[operator]
            self.qkv, self.rows, self.cos, self.sin, *self.norms, EPS, keys, values
        )
        return q, keys[:-1], values[:-1]


def angles(dim: int) -> Tensor:
    """[P, D / 2]"""
    frequencies = 100.0 ** -(torch.arange(dim // 2) / (dim // 2))
    return torch.outer(torch.arange(NUM_POSITIONS), frequencies)


def make_case(heads: Heads, num_rows: int, has_norm: bool, dtype: torch.dtype) -> Case:
    """Every third row only fills up: its slot is the padding slot."""
    draws = torch.Generator().manual_seed(num_rows)
    num_slots = 2 * num_rows + 1
    slots = torch.randperm(num_slots - 1, generator=draws)[:num_rows]
    slots[::3] = num_slots - 1
    rows = make_rows(
        Shape((Item(0, 0),) * num_rows, 1),
        torch.zeros(1, 1),
        torch.zeros(num_rows),
        positions=torch.randint(NUM_POSITIONS, (num_rows,), generator=draws).to(DEVICE),
        slots=slots.to(DEVICE),
    )
    turn = angles(heads.dim)
    norms = torch.randn(2, heads.dim, generator=draws).to(DEVICE, dtype)
    cache = torch.full((2, num_slots, heads.kv, heads.dim), UNTOUCHED, dtype=dtype, device=DEVICE)
    width = (heads.q + 2 * heads.kv) * heads.dim
    return Case(
        torch.randn(num_rows, width, generator=draws).to(DEVICE, dtype),
        rows,
        torch.cat((turn.cos(), turn.cos()), -1).to(DEVICE),
        torch.cat((-turn.sin(), turn.sin()), -1).to(DEVICE),
        (norms[0], norms[1]) if has_norm else (None, None),
        *cache.unbind(),
    )


HEADS = st.builds(Heads, st.integers(1, 9), st.integers(1, 3), st.sampled_from([8, 24, 64]))


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(heads=HEADS, num_rows=st.integers(1, 5), has_norm=st.booleans(), half=st.booleans())
def test_kernel_agrees_with_its_reference(
    heads: Heads, num_rows: int, has_norm: bool, half: bool
) -> None:
    dtype = torch.float16 if half else torch.float32
    case = make_case(heads, num_rows, has_norm, dtype)
    ours, references = case.run(rotate_and_write), case.run(reference.rotate_and_write)
    assert ours[0].is_contiguous()
    for our, expected in zip(ours, references, strict=True):
        torch.testing.assert_close(our, expected, **TOLERANCE[dtype])
    assert torch.equal(ours[2], references[2])  # values are only copied


def test_slots_of_no_row_stay_as_they_were() -> None:
    case = make_case(Heads(2, 1, 8), 5, False, torch.float32)
    _, keys, values = case.run(rotate_and_write)
    written = torch.zeros(len(keys) + 1, dtype=torch.bool, device=DEVICE)
    written[case.rows.slots] = True
    assert written[:-1].sum() == 3  # of five rows two go to the padding slot
    assert (keys[~written[:-1]] == UNTOUCHED).all()
    assert (values[~written[:-1]] == UNTOUCHED).all()
    assert (keys[written[:-1]] != UNTOUCHED).all()


def test_reference_turns_each_pair_by_its_angle() -> None:
    case = make_case(Heads(2, 1, 8), 3, False, torch.float64)
    q, _, _ = case.run(reference.rotate_and_write)
    turn = angles(8)
    for row, position in enumerate(case.rows.positions.tolist()):
        for head in range(2):
            for i in range(4):
                x, y = (case.qkv[row, head * 8 + column].item() for column in (i, i + 4))
                angle = turn[position, i].item()
                expected = (
                    x * math.cos(angle) - y * math.sin(angle),
                    x * math.sin(angle) + y * math.cos(angle),
                )
                assert (q[row, head, i].item(), q[row, head, i + 4].item()) == pytest.approx(
                    expected, abs=1e-6
                )


@pytest.mark.parametrize("has_norm", [False, True])
def test_reference_gives_what_the_layers_give(has_norm: bool) -> None:
    heads = Heads(4, 2, 8)
    case = make_case(heads, 4, has_norm, torch.float32)
    given = case.qkv.view(4, -1, heads.dim).split((heads.q, heads.kv, heads.kv), dim=1)
    positions = case.rows.positions
    rotation = case.cos[positions].unsqueeze(1), case.sin[positions].unsqueeze(1)
    expected = []
    for x, weight in zip(given[:2], case.norms, strict=True):
        norm = RMSNorm(heads.dim, EPS).to(DEVICE)
        if weight is not None:
            norm.weight.data = weight
        expected.append(rotate(norm(x) if has_norm else x, rotation))
    q, keys, values = case.run(reference.rotate_and_write)
    torch.testing.assert_close(q, expected[0], **TOLERANCE[torch.float32])
    is_real = case.rows.slots < len(keys)
    slots = case.rows.slots[is_real]
    torch.testing.assert_close(keys[slots], expected[1][is_real], **TOLERANCE[torch.float32])
    assert torch.equal(values[slots], given[2][is_real])


def test_a_row_is_batch_invariant() -> None:
    case = make_case(Heads(3, 1, 16), 4, True, torch.float32)
    together, _, _ = case.run(rotate_and_write)
    for row in range(4):
        own = slice(row, row + 1)
        rows = case.rows._replace(positions=case.rows.positions[own], slots=case.rows.slots[own])
        alone = Case(
            case.qkv[own], rows, case.cos, case.sin, case.norms, case.keys, case.values
        ).run(rotate_and_write)
        assert torch.equal(alone[0], together[own])


@pytest.mark.gpu
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(32, 8, 128), Heads(8, 2, 256)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 1024])
def test_bf16_agrees_at_realistic_sizes(heads: Heads, num_rows: int, has_norm: bool) -> None:
    case = make_case(heads, num_rows, has_norm, torch.bfloat16)
    ours, references = case.run(rotate_and_write), case.run(reference.rotate_and_write)
    for our, expected in zip(ours, references, strict=True):
        torch.testing.assert_close(our, expected, **TOLERANCE[torch.bfloat16])

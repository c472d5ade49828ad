"""Rows that Triton brings to their places equal those of the reference to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.reference import gather as reference

from .batch_cases import DEVICE, EXAMPLES

gpu = pytest.importorskip("peagle.kernels.gpu.gather")


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    batch=st.integers(1, 4),
    given_rows=st.integers(1, 5),
    num_rows=st.integers(1, 8),
    size=st.sampled_from([1, 6, 16, 33]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_expand_rows_equals_its_reference(
    batch: int, given_rows: int, num_rows: int, size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    real = torch.randn(batch, given_rows, size, generator=generator).to(DEVICE, dtype)
    mask = torch.randn(size, generator=generator).to(DEVICE, dtype)
    num_real = torch.randint(given_rows + 1, (batch,), generator=generator).to(DEVICE)
    ours = gpu.expand_rows(real, num_real, mask, num_rows)
    assert torch.equal(ours, reference.expand_rows(real, num_real, mask, num_rows))


@pytest.mark.parametrize("size", [1024, 1500])
def test_expand_rows_of_more_than_one_tile(size: int) -> None:
    real, mask = torch.randn(2, 2, size, device=DEVICE), torch.randn(size, device=DEVICE)
    num_real = torch.tensor([1, 2], device=DEVICE)
    ours = gpu.expand_rows(real, num_real, mask, 3)
    assert torch.equal(ours, reference.expand_rows(real, num_real, mask, 3))


@pytest.mark.parametrize("size", [1, 6, 1500])
def test_embed_rows_equals_its_reference(size: int) -> None:
    table, mask = torch.randn(9, size, device=DEVICE), torch.randn(size, device=DEVICE)
    token_ids = torch.randint(9, (4, 3), device=DEVICE)
    num_real = torch.tensor([0, 1, 2, 3], device=DEVICE)
    for num_rows in (2, 5):
        arguments = (table, token_ids, num_real, mask, num_rows)
        assert torch.equal(gpu.embed_rows(*arguments), reference.embed_rows(*arguments))


@pytest.mark.parametrize("size", [1, 6, 1500])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_embed_tokens_equals_its_reference(size: int, depth: int) -> None:
    table = torch.randn(9, size, device=DEVICE)
    first, others = torch.randint(9, (4,)).to(DEVICE), torch.randint(9, (4, depth)).to(DEVICE)
    assert torch.equal(
        gpu.embed_tokens(table, first, others), reference.embed_tokens(table, first, others)
    )
    places = torch.randperm(4 * (depth + 1), device=DEVICE)[:3]
    ours = gpu.embed_tokens(table, first, others, places)
    assert torch.equal(ours, reference.embed_tokens(table, first, others)[places])
    assert torch.equal(ours, reference.embed_tokens(table, first, others, places))


@pytest.mark.parametrize(("rows", "count", "size"), [(8, 1, 24), (14, 7, 24), (3, 3, 1100)])
def test_pick_rows_equals_its_reference(rows: int, count: int, size: int) -> None:
    num_real = torch.tensor([0, 1, 2, rows], device=DEVICE)  # none, some, all of a slot's rows
    hidden = torch.randn(4 * rows, size, device=DEVICE)
    arguments = (hidden, num_real, rows, count)
    assert torch.equal(gpu.pick_rows(*arguments), reference.pick_rows(*arguments))


def test_picked_rows_begin_at_the_last_real_one() -> None:
    hidden = torch.arange(10, device=DEVICE).float()[:, None]  # 2 slots of 5 rows
    num_real = torch.tensor([3, 1], device=DEVICE)
    for picked in (
        gpu.pick_rows(hidden, num_real, 5, 2),
        reference.pick_rows(hidden, num_real, 5, 2),
    ):
        assert picked[:, 0].tolist() == [2, 3, 5, 6]

"""Packing keeps every document once, whole, and starting at position 0."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.data.packing import assign, lay_out

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=120)


@pytest.mark.slow
@given(lengths, st.integers(20, 64))
def test_every_document_lies_in_exactly_one_row_that_holds_it(sizes: list[int], room: int) -> None:
    rows = assign(sizes, room)
    assert sorted(item for row in rows for item in row) == list(range(len(sizes)))
    assert all(sum(sizes[item] for item in row) <= room for row in rows)


@given(lengths)
def test_rows_are_nearly_full(sizes: list[int]) -> None:
    rows = assign(sizes, 64)
    # Two rows that would fit into one are never both closed early: at most 32 stay open.
    assert len(rows) <= max(sum(sizes) / (64 - 20 + 1) + 1, 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_positions_restart_and_padding_stands_alone(sizes: list[int]) -> None:
    tokens = [torch.arange(n) + 100 * i for i, n in enumerate(sizes)]
    masks = [torch.ones(n, dtype=torch.uint8) for n in sizes]
    row = lay_out(tokens, masks, list(range(len(sizes))), 60)
    for document, n in enumerate(sizes):
        here = row.document == document
        assert row.token_ids[here].tolist() == tokens[document].tolist()
        assert row.position[here].tolist() == list(range(n))
    padding = row.document >= len(sizes)
    assert len(row.document[padding].unique()) == 60 - sum(sizes)
    assert not row.loss_mask[padding].any()
    assert (row.document.diff() >= 0).all()

"""Batches and prompts are filled up to few sizes, and not to much larger ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from peagle.engine.lanes.shapes import padded


@given(st.integers(1, 5000))
def test_less_than_a_third_of_the_items_is_padding(num_items: int) -> None:
    assert 2 / 3 * padded(num_items) < num_items <= padded(num_items)


def test_a_thousand_numbers_of_items_need_twenty_graphs() -> None:
    sizes = {padded(n) for n in range(1, 1001)}
    assert len(sizes) <= 20
    assert {1, 2, 3, 4, 6, 8, 12, 16, 24, 32} <= sizes

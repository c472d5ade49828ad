"""Both attention objects of training say what a brute-force definition says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from peagle.models.attention import MaskedAttention
from peagle.models.masks import Elements, dense_mask
from peagle.teacher_forcing import attention
from peagle.teacher_forcing.attention import FlexAttention, classify_blocks
from peagle.teacher_forcing.draft_model import context_for
from peagle.teacher_forcing.partition import Segment, Shapes, build_segments, supervised_runs
from peagle.train.cod import draw_depths, retentions
from tests.tiny import training
from tests.tolerance import near

sizes = st.lists(st.integers(1, 90), min_size=1, max_size=5)


def segment_of(lengths: list[int], seed: int, padded: int = 1) -> Segment:
    capacity = sum(lengths) + seed % 7
    row = training.packed(lengths, capacity + -capacity % padded, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    counts = draw_depths(supervised_runs(row), retentions(4, 0.8, 0.0), generator)
    n = len(row.token_ids)
    (segment,) = build_segments(row, counts, [0, n], torch.ones(4), Shapes(row_multiple=padded))
    return segment


def brute_force(elements: Elements) -> torch.Tensor:
    """The definition, pair by pair, in words of the method."""
    rows = list(zip(*(f.tolist() for f in elements), strict=True))
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for i, (anchor, depth, document) in enumerate(rows):
        for j, (key_anchor, key_depth, key_document) in enumerate(rows):
            context = key_depth == 0 and key_anchor <= anchor
            rollout = key_anchor == anchor and key_depth <= depth
            mask[i, j] = document == key_document and (context or rollout)
    return mask


@settings(max_examples=10)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(0, 99))
def test_the_dense_mask_is_the_definition(lengths: list[int], seed: int) -> None:
    elements = segment_of(lengths, seed).elements
    assert torch.equal(dense_mask(elements), brute_force(elements))


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=5) | st.just([700]),
    st.integers(0, 99),
    st.sampled_from([1, 128]),
    st.sampled_from([None, 8, 130, 300]),
)
def test_block_classes_never_hide_a_visible_pair(
    lengths: list[int], seed: int, padded: int, window: int | None
) -> None:
    segment = segment_of(lengths, seed, padded)
    rows = MaskedAttention(dense_mask(segment.elements), segment.positions)
    possible, certain = classify_blocks(segment.elements, segment.positions, window)
    pairs = blocks_of(rows.visible(window))
    assert not (pairs.any(-1) & ~possible).any()
    assert not (certain & ~pairs.all(-1)).any()


def blocks_of(mask: torch.Tensor) -> torch.Tensor:
    """[blocks, blocks, pairs of the block]; pairs beyond the last row are invisible."""
    missing = -len(mask) % attention.BLOCK
    mask = torch.nn.functional.pad(mask, (0, missing, 0, missing))
    size, count = attention.BLOCK, len(mask) // attention.BLOCK
    return mask.view(count, size, count, size).transpose(1, 2).flatten(2)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "most"), [(None, 1.1), (150, 1.25)])
def test_block_classes_visit_hardly_more_blocks_than_needed(
    window: int | None, most: float
) -> None:
    lengths = torch.randint(50, 400, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    segment = segment_of(lengths, seed=0, padded=128)  # as on GPU
    rows = MaskedAttention(dense_mask(segment.elements), segment.positions)
    pairs = blocks_of(rows.visible(window))
    possible, certain = classify_blocks(segment.elements, segment.positions, window)
    assert possible.sum() <= most * pairs.any(-1).sum()
    assert certain.sum() >= 0.95 * pairs.all(-1).sum()


@pytest.mark.slow
@settings(max_examples=5)
@given(sizes, st.integers(0, 99), st.sampled_from([None, 16]))
def test_flex_attention_equals_dense_attention(
    lengths: list[int], seed: int, window: int | None
) -> None:
    segment = segment_of(lengths, seed)
    n = len(segment.positions)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, 4, 16, generator=generator)
    k, v = torch.randn(2, n, 2, 16, generator=generator)
    dense = MaskedAttention(dense_mask(segment.elements), segment.positions)
    flex = FlexAttention(segment.elements, segment.positions, (None, 16))
    expected = dense(0, q, k, v, window)
    torch.testing.assert_close(flex(0, q, k, v, window), expected, **near(terms=n))


def test_one_kernel_is_compiled_for_all_windows() -> None:
    """A chain asks for another at each of its steps."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    segment = segment_of([90], seed=0)
    flex = torch.compile(flex_attention, dynamic=False, backend=backend)
    x = torch.randn(len(segment.positions), 2, 16)
    windows = tuple(range(20, 9, -1))
    rows = FlexAttention(segment.elements, segment.positions, windows, flex)
    outputs = [rows(0, x, x, x, window) for window in windows]
    assert len(compiled) == 1
    assert not torch.equal(outputs[0], outputs[-1])


@pytest.mark.slow
@settings(max_examples=5)
@given(sizes, st.integers(0, 99), st.sampled_from([None, 16, 1, 0, -2]))
def test_rows_behind_their_anchor_see_the_same_context_in_both_forms(
    lengths: list[int], seed: int, window: int | None
) -> None:
    row = training.packed(lengths, sum(lengths))
    n = len(row.token_ids)
    slot = torch.arange(n, dtype=torch.int32)
    elements, position = Elements(slot, torch.zeros_like(slot), row.document), row.position.long()
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(n, 4, 16, generator=generator)
    k, v = torch.randn(2, n, 2, 16, generator=generator)
    out, lse = context_for(elements, position).with_lse(q, k, v, window)
    flex = FlexAttention(elements, position, (window,)).with_lse(q, k, v, window)
    sees_some = lse.isfinite()  # elsewhere the output weighs nothing
    torch.testing.assert_close(flex[0][sees_some], out[sees_some], **near(terms=n))
    torch.testing.assert_close(flex[1], lse, **near(terms=n))

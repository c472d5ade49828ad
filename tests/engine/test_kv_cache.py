"""Paged attention: each fast path agrees with plain causal attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import MAX_FOLDED_ROWS, PagedKVCache
from peagle.engine.layer_groups import Window, slot_bytes
from peagle.models.attention import causal_attention
from peagle.models.drafter import CacheLayout, Span
from tests.tolerance import near

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 4, 3
LAYOUT = CacheLayout(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM)
NUM_BLOCKS = 60


def table_with(blocks: list[int]) -> BlockTable:
    table = BlockTable(BLOCK, range(0))
    for block in blocks:
        table.append(block)
    return table


def rows(seed: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, HEADS, DIM, generator=generator, dtype=torch.float64)
    k = torch.randn(length, KV_HEADS, DIM, generator=generator, dtype=torch.float64)
    v = torch.randn(length, KV_HEADS, DIM, generator=generator, dtype=torch.float64)
    return q, k, v


def poisoned_cache() -> PagedKVCache:
    cache = PagedKVCache(LAYOUT, NUM_BLOCKS * BLOCK, torch.float64, torch.device("cpu"))
    cache.keys.fill_(torch.nan)  # reading what was never written shows
    cache.values.fill_(torch.nan)
    return cache


@pytest.mark.slow
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 45), min_size=1, max_size=3),
    scattered=st.booleans(),
    window=st.sampled_from([None, 1, 4, 20, 100]),
    layer=st.integers(0, 1),
    data=st.data(),
)
def test_paged_attention_in_any_chunks_equals_plain_causal_attention(
    lengths: list[int], scattered: bool, window: int | None, layer: int, data: st.DataObject
) -> None:
    cache = poisoned_cache()
    blocks = list(range(NUM_BLOCKS))
    if scattered:
        blocks = data.draw(st.permutations(blocks))
    tables = [table_with(blocks[15 * n : 15 * n + 15]) for n in range(len(lengths))]
    whole = [rows(n, length) for n, length in enumerate(lengths)]
    positions = [torch.arange(length) for length in lengths]
    expected = [
        causal_attention(p)(layer, *qkv, window) for p, qkv in zip(positions, whole, strict=True)
    ]
    done = [0] * len(lengths)
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        spans = []
        for n, length in enumerate(lengths):
            if done[n] < length:
                spans.append(Span(n, done[n], data.draw(st.integers(1, length - done[n]))))
        attention = cache.attention(tables, spans)
        parts = [[x[s.start : s.start + s.length] for x in whole[s.sequence]] for s in spans]
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        out = attention(layer, q, k, v, window)
        assert attention.positions.tolist() == [
            p for s in spans for p in range(s.start, s.start + s.length)
        ]
        first = 0
        for s in spans:
            ours = out[first : first + s.length]
            theirs = expected[s.sequence][s.start : s.start + s.length]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
            first += s.length
            done[s.sequence] += s.length


@pytest.mark.parametrize("length", [1, 2, MAX_FOLDED_ROWS, MAX_FOLDED_ROWS + 1, 30])
@pytest.mark.parametrize("window", [None, 3])
def test_the_slice_of_a_table_in_one_piece_equals_the_gather(
    length: int, window: int | None
) -> None:
    outs = []
    for gathers in (False, True):
        cache = poisoned_cache()
        table = table_with(list(range(4, 20)))
        table.contiguous = not gathers
        for span in (Span(0, 0, 5), Span(0, 5, length)):
            attention = cache.attention([table], [span])
            outs.append(attention(0, *rows(span.start, span.length), window))
            assert (attention.rows(0).sequences[0].extent is None) == gathers
    torch.testing.assert_close(outs[0], outs[2], rtol=0, atol=0)
    torch.testing.assert_close(outs[1], outs[3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # torch's operations, a kernel
@pytest.mark.parametrize("scattered", [False, True])
def test_blocks_that_a_window_has_passed_are_not_read(scattered: bool, dtype: torch.dtype) -> None:
    window, dim, length = 5, 8, 40
    q, k, v = (torch.randn(length, heads, dim, dtype=dtype) for heads in (4, 2, 2))
    expected = causal_attention(torch.arange(length))(0, q, k, v, window)
    layout = CacheLayout(1, 2, dim)
    cache = PagedKVCache(layout, NUM_BLOCKS * BLOCK, dtype, torch.device("cpu"))
    table = BlockTable(BLOCK, range(0), Window(window, NUM_BLOCKS))
    for n in range(-(-length // BLOCK)):
        table.append(n * 7 % NUM_BLOCKS if scattered else n + 3)
    start = 0
    for count in (1, 2, 9, 1, 4, 1, 20, 2):
        for block in table.pass_by(start):
            cache.keys[:, block * BLOCK : (block + 1) * BLOCK] = torch.nan
            cache.values[:, block * BLOCK : (block + 1) * BLOCK] = torch.nan
        rows = slice(start, start + count)
        out = cache.attention([table], [Span(0, start, count)])(
            0, q[rows], k[rows], v[rows], window
        )
        torch.testing.assert_close(out, expected[rows], **near(terms=dim))
        start += count
    assert table.num_passed == (start - 2 - window + 1) // BLOCK > 0


def test_rows_left_by_rejected_drafts_are_overwritten_before_they_are_seen() -> None:
    cache = poisoned_cache()
    table = table_with([7, 2, 9, 30])
    q, k, v = rows(1, 10)
    cache.attention([table], [Span(0, 0, 4)])(0, q[:4], k[:4], v[:4], None)
    wrong = rows(2, 4)
    cache.attention([table], [Span(0, 4, 4)])(0, *wrong, None)
    out = cache.attention([table], [Span(0, 4, 2)])(0, q[4:6], k[4:6], v[4:6], None)
    expected = causal_attention(torch.arange(6))(0, q[:6], k[:6], v[:6], None)
    torch.testing.assert_close(out, expected[4:], rtol=0, atol=1e-12)


def test_slot_bytes_counts_keys_and_values_of_all_layers() -> None:
    cache = PagedKVCache(LAYOUT, 10, torch.float32, torch.device("cpu"))
    slots = 10 + 1  # and the trash
    assert slots * slot_bytes(LAYOUT, torch.float32) == cache.keys.nbytes + cache.values.nbytes

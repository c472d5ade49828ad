"""Attention of few rows per sequence over a paged cache.

Shapes: I items, Q rows each, N rows in all, S slots, h heads, g key-value heads, D head dimension.
The h / g heads that share a key-value head are further rows of one tile: each key is read once.

A row's bits depend on its own item, on `num_splits` and on the tile alone.

Each tile of keys has a softmax of its own, relative to a power of two: 2 to its highest score,
which is rounded up. So bringing two tiles to one scale is exact, and only the order of their sums
counts: that of their positions.

Batch-invariant, a row's bits depend on its own item alone: the tile is the same for any number of
rows, one tile of keys is one part of the splits, at multiples of its size, and parts are added in
order whether one program has met them all or the merge has. Parts without keys add nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import fetch_rows, overlapping, wait
from peagle.kernels.policy import FAST, Policy
from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.kernels.rows import PagedRows

# The highest score of a row that has seen no key. Finite: the difference of two is not NaN.
LOWEST = tl.constexpr(-1.0e30)
SPLITS_AT_ONCE = 8
# An H200's multiprocessors: more programs wait for a place, not for the kernel ahead, and have no
# time to fetch anything.
FULL_PROGRAMS = 132
# More rows per program than this and an item's rows are divided over several: its registers hold
# a float32 result of that many rows.
MAX_TILE_ROWS = 64
# The smallest side that a matrix product of the GPU takes.
MIN_SIDE = 16
COARSE_SPLIT, FINE_SPLIT = 128, 64  # keys of a part: one tile
PARTS_PER_SM = 32  # that are worth their writing when they do not run at once
FEW_PROGRAMS = 16  # without splits: up to so many, fine parts find room on a large GPU


class AttentionTile(NamedTuple):
    block_m: int  # rows: queries times the heads that share a key-value head
    block_n: int  # keys
    block_d: int  # head dimension, padded
    num_warps: int
    num_stages: int


def tile(num_rows: int, group: int, dim: int, programs: int) -> AttentionTile:
    """For items of `num_rows` rows and `group` heads per key-value head; `programs` is the number
    of items times that of key-value heads. The tile of keys does not depend on the context, nor,
    with few programs, on the rows: one request has the same one with drafts and without. Where
    programs wait for others to end, those of a single row are the quicker for small tiles."""
    if dim > 256:  # a wide result leaves registers for few rows
        return AttentionTile(MIN_SIDE, 32, padded(dim), num_warps=4, num_stages=2)
    block_m = min(padded(num_rows * group), MAX_TILE_ROWS)
    waits = programs > 2 * FULL_PROGRAMS and block_m == MIN_SIDE
    small = programs <= FEW_PROGRAMS or block_m == MAX_TILE_ROWS or dim > 64 or waits
    block_n = 32 if dim > 128 else FINE_SPLIT if small else COARSE_SPLIT
    return AttentionTile(block_m, block_n, padded(dim), num_warps=4, num_stages=3)


def batch_invariant_tile(dim: int) -> AttentionTile:
    """For items of any number of rows: one tile of keys, and one layout of it over threads, which
    sums of weights follow."""
    return AttentionTile(32, keys_of_a_part(dim), padded(dim), num_warps=4, num_stages=3)


def keys_of_a_part(dim: int) -> int:
    return 32 if dim > 128 else FINE_SPLIT


def padded(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(MIN_SIDE, int(triton.next_power_of_2(size)))


def choose_splits(num_items: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """Over how many programs an item's keys are divided. Tiles of keys follow each other, at
    more than a microsecond each, while most of the GPU is idle: so even short contexts are
    divided, as long as all parts run at once."""
    programs = num_items * kv_heads
    shortest = FINE_SPLIT if programs <= FEW_PROGRAMS else COARSE_SPLIT
    return max(min(num_sms // programs, max_context // shortest), 1)


def batch_invariant_splits(
    num_items: int, kv_heads: int, dim: int, max_context: int, num_sms: int
) -> int:
    """A part for each tile of keys up to `max_context`, which counts the new rows, too; 1 where the
    GPU is full without and parts would only be written and read. The results are the same."""
    programs, parts = num_items * kv_heads, -(-max_context // keys_of_a_part(dim))
    is_full = programs >= num_sms // 2
    return 1 if is_full and programs * parts > PARTS_PER_SM * num_sms else max(parts, 1)


def paged_attention(
    q: Tensor,  # [N, h, D]
    keys: Tensor,  # [S, g, D]
    values: Tensor,  # [S, g, D]
    rows: PagedRows,
    window: int | None,
    policy: Policy = FAST,
    out: Tensor | None = None,  # [N, h, D]
    scores: Scores = PLAIN,
) -> Tensor:
    """-> [N, h, D], in `out` where it is given; zeros for a row that sees no key.

    Batch-invariant: `num_splits` is 1, or so many tiles of keys that they hold the longest context.
    With fewer the result is right, but the last part's sums have another order.
    """
    num_rows, heads, dim = q.shape
    assert rows.row_starts is not None or num_rows == len(rows.starts) * rows.rows_per_item
    assert heads % keys.shape[1] == 0
    assert q.is_contiguous()
    # A layer's keys may be the beginnings of wider rows.
    assert keys.stride() == values.stride() == (keys.stride(0), dim, 1)
    assert rows.block_tables.stride(1) == 1
    out = torch.empty_like(q) if out is None else out
    if num_rows == 0:
        return out
    if rows.num_splits == 1:
        _run(q, keys, values, rows, window, policy, scores, out, out)
        return out
    parts = (num_rows, heads, rows.num_splits)
    results = torch.empty(*parts, dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(*parts, 2, dtype=torch.float32, device=q.device)
    _run(q, keys, values, rows, window, policy, scores, results, statistics)
    _merge[(num_rows * heads,)](
        results,
        statistics,
        out,
        scores.sinks,
        HEADS=heads,
        D=dim,
        SPLITS=rows.num_splits,
        PADDED_SPLITS=triton.next_power_of_2(rows.num_splits),
        CHUNK=SPLITS_AT_ONCE,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=2,
        **overlapping(),
    )
    return out


def _run(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PagedRows,
    window: int | None,
    policy: Policy,
    scores: Scores,
    results: Tensor,
    statistics: Tensor,
) -> None:
    (_, heads, dim), kv_heads = q.shape, keys.shape[1]
    group = heads // kv_heads
    if policy.batch_invariant:
        sizes = batch_invariant_tile(dim)
    else:
        sizes = tile(_usual_rows(rows, kv_heads), group, dim, len(rows.starts) * kv_heads)
    row_tiles = triton.cdiv(rows.rows_per_item * group, sizes.block_m)
    grid = (len(rows.starts) * row_tiles, kv_heads, rows.num_splits)
    fetches = math.prod(grid) <= FULL_PROGRAMS
    _attend[grid](
        q,
        keys,
        values,
        results,
        statistics,
        rows.block_tables,
        rows.tables,
        rows.starts,
        rows.ends,
        rows.ancestors,
        rows.positions if window and rows.ancestors is not None else None,
        rows.row_starts,
        scores.sinks,
        rows.block_tables.stride(0),
        rows.block_tables.shape[1] * rows.block_size,
        rows.first_row,
        math.log2(math.e) * (1 / math.sqrt(dim) if scores.scale is None else scores.scale),
        math.log2(math.e) * (scores.cap or 0.0),
        Q=rows.rows_per_item,
        IS_LATER=rows.first_row > 0,
        LAST_BIT=31 if rows.first_row + rows.rows_per_item <= 32 else 63,
        GROUP=group,
        KV_HEADS=kv_heads,
        D=dim,
        SLOT=keys.stride(0),
        HAS_CAP=scores.cap is not None,
        WINDOW=window or 0,
        BLOCK_SIZE=rows.block_size,
        SPLITS=rows.num_splits,
        FIXED_SPLITS=policy.batch_invariant,
        ROW_TILES=row_tiles,
        BLOCK_M=sizes.block_m,
        BLOCK_N=sizes.block_n,
        BLOCK_D=sizes.block_d,
        FETCHED=2 * sizes.block_n if fetches else 0,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **overlapping(),
    )


def _usual_rows(rows: PagedRows, kv_heads: int) -> int:
    """Of an item that a tile should hold. Where items share rows, those of the average one; on a
    full GPU twice as many, for an item of several tiles has its keys read by each of them."""
    if rows.row_starts is None:
        return rows.rows_per_item
    num_items = len(rows.starts)
    mean = -(-len(rows.positions) // num_items)
    is_full = num_items * kv_heads > FULL_PROGRAMS
    return min(2 * mean if is_full else mean, rows.rows_per_item)


@triton.jit
def _fetch_old(
    keys_ptr, values_ptr, table_ptr, positions, kv_head,
    SLOT: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Old keys and values come from memory while the new ones are still computed."""
    block = tl.load(table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + positions % BLOCK_SIZE
    offset = (slot * SLOT + kv_head * D)[:, None]
    fetch_rows(keys_ptr + offset, D)
    fetch_rows(values_ptr + offset, D)


@triton.jit
def _power_of_two(exponent):
    """2 to whole numbers that are not above 0, exactly; 0 from -127 on. `tl.exp2` approximates."""
    bits = (tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _with_sink(sink, highest, total):
    """-> by what to multiply a row's result so far, and its sum of weights with the sink's in it,
    both relative to the higher of the two."""
    sink = sink.to(tl.float32) * 1.4426950408889634  # log2(e)
    above = tl.maximum(highest, tl.ceil(sink))
    share = _power_of_two(highest - above)
    return share, total * share + tl.exp2(sink - above)


# The integers have nothing to do with the sums; so that no other form is compiled for theirs, such
# as for each depth of a beam.
@triton.jit(
    do_not_specialize=["table_stride", "capacity", "tree_row"],
    do_not_specialize_on_alignment=[
        *("block_tables_ptr", "tables_ptr", "starts_ptr", "ends_ptr"),
        *("ancestors_ptr", "positions_ptr", "row_starts_ptr", "sinks_ptr"),
    ],
)
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    results_ptr,  # [N, h, D] of q's dtype, or with splits [N, h, SPLITS, D] float32
    statistics_ptr,  # with splits: [N, h, SPLITS, 2] float32
    block_tables_ptr,
    tables_ptr,
    starts_ptr,
    ends_ptr,
    ancestors_ptr,  # [I * Q] of trees, or None
    positions_ptr,  # [N] of trees under a window, or None
    row_starts_ptr,  # [I + 1] of items that share rows, or None
    sinks_ptr,  # [h], or None
    table_stride,
    capacity,  # positions of a block table
    tree_row,  # of a tree, that is the item's first
    scale,  # of scores whose exponentials are powers of two
    cap,  # of such scores
    Q: tl.constexpr,
    IS_LATER: tl.constexpr,  # that row is not the tree's first
    LAST_BIT: tl.constexpr,  # of ancestors
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    SLOT: tl.constexpr,  # values from one slot to the next
    HAS_CAP: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,  # each is one tile of keys, but the last, which has the rest
    ROW_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FETCHED: tl.constexpr,  # old keys that are fetched ahead
    OVERLAPS: tl.constexpr,
):
    # 1. Which rows: queries and the heads of a group, folded.
    item, kv_head = tl.program_id(0) // ROW_TILES, tl.program_id(1)
    first_folded = (tl.program_id(0) % ROW_TILES) * BLOCK_M
    folded = first_folded + tl.arange(0, BLOCK_M)
    row = folded // GROUP  # of the item
    head = kv_head * GROUP + folded % GROUP
    column = tl.arange(0, BLOCK_D)
    first, num_rows = item.to(tl.int64) * Q, Q
    if row_starts_ptr is not None:
        first = tl.load(row_starts_ptr + item).to(tl.int64)
        num_rows = (tl.load(row_starts_ptr + item + 1) - first).to(tl.int32)
    place = (first + row) * (KV_HEADS * GROUP) + head  # in [N, h]
    is_real = (row < num_rows)[:, None] & (column < D)[None, :]

    # 2. Which keys: those that some row of the tile sees, and of them this split's part. Tiles
    # begin at multiples of BLOCK_N, so that a row's sums do not depend on its place in the item.
    start = tl.load(starts_ptr + item).to(tl.int32)
    position = start + row  # [BLOCK_M]; of a tree: where it lies
    if ancestors_ptr is not None:
        own_row = item.to(tl.int64) * Q + row
        ancestors = tl.load(ancestors_ptr + own_row, mask=row < Q, other=0)
        if LAST_BIT == 31:
            ancestors = ancestors.to(tl.uint32)
    last_row = tl.minimum((first_folded + BLOCK_M - 1) // GROUP, num_rows - 1)
    end = tl.minimum(tl.load(ends_ptr + item).to(tl.int32), start + tree_row + last_row + 1)
    if row_starts_ptr is not None:
        end = tl.where(first_folded < num_rows * GROUP, end, 0)  # or the tile has no row
    end = tl.minimum(end, capacity)
    begin, lowest = 0, 0
    if WINDOW > 0:
        first_row = first_folded // GROUP
        if ancestors_ptr is not None:
            first_row = 0  # the tile's lowest position is the first row's, at worst
        lowest = tl.maximum(start + first_row - WINDOW + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
    if SPLITS > 1:
        split = tl.program_id(2)
        if FIXED_SPLITS:
            if split < SPLITS - 1:
                end = tl.minimum(end, (split + 1) * BLOCK_N)
            begin = tl.maximum(begin, split * BLOCK_N)
        else:
            num_tiles = (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N
            split_length = (num_tiles + SPLITS - 1) // SPLITS * BLOCK_N
            begin += split * split_length
            end = tl.minimum(end, begin + split_length)

    table_ptr = block_tables_ptr + tl.load(tables_ptr + item).to(tl.int64) * table_stride
    if OVERLAPS:
        if FETCHED > 0:
            last = tl.maximum(tl.minimum(end, start) - 1, 0)
            ahead = tl.minimum(begin + tl.arange(0, FETCHED), last)
            _fetch_old(keys_ptr, values_ptr, table_ptr, ahead, kv_head, SLOT, D, BLOCK_SIZE)
        wait()
    q = tl.load(q_ptr + place[:, None] * D + column[None, :], mask=is_real, other=0.0)

    # 3. A softmax of each tile, and their sum so far, relative to the highest of their scores.
    highest = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for tile_begin in range(begin, end, BLOCK_N):
        key = tile_begin + tl.arange(0, BLOCK_N)
        may_read = key < end
        if WINDOW > 0:  # blocks before it may be another request's by now
            may_read = may_read & (key >= lowest)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=may_read, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        offset = (slot * SLOT + kv_head * D)[:, None] + column[None, :]
        # What was never written may be NaN, and 0 * NaN is NaN: it is not even loaded.
        is_there = may_read[:, None] & (column < D)[None, :]
        k = tl.load(keys_ptr + offset, mask=is_there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = cap * _tanh(scores / cap)
        if ancestors_ptr is None:
            sees = may_read[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                sees = sees & (key[None, :] > position[:, None] - WINDOW)
        else:
            is_before = key < start
            bit = tl.minimum(tl.maximum(key - start, 0), LAST_BIT).to(ancestors.dtype)
            is_ancestor = ((ancestors[:, None] >> bit[None, :]) & 1) == 1
            sees = may_read[None, :] & (is_before[None, :] | is_ancestor)
            if WINDOW > 0:
                own = tl.load(positions_ptr + first + row, mask=row < num_rows, other=0)
                passed = own.to(tl.int32)[:, None] - WINDOW
                if IS_LATER:  # as in the reference
                    sees = sees & (~is_before[None, :] | (key[None, :] > passed))
                else:
                    theirs = positions_ptr + first + key - start
                    in_item = may_read & (key >= start) & (key < start + num_rows)
                    key_position = tl.load(theirs, mask=in_item, other=0).to(tl.int32)
                    key_position = tl.where(is_before, key, key_position)
                    sees = sees & (key_position[None, :] > passed)
        scores = tl.where(sees, scores, float("-inf"))
        peak = tl.maximum(tl.ceil(tl.max(scores, axis=1)), LOWEST)
        weights = tl.exp2(scores - peak[:, None])
        v = tl.load(values_ptr + offset, mask=is_there, other=0.0)
        product = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        new_highest = tl.maximum(highest, peak)
        rescale, share = _power_of_two(highest - new_highest), _power_of_two(peak - new_highest)
        result = result * rescale[:, None] + product * share[:, None]
        total = total * rescale + tl.sum(weights, axis=1) * share
        highest = new_highest

    # 4. The result, or what the merge needs of it.
    if SPLITS == 1:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=row < Q, other=0.0)
            share, total = _with_sink(sink, highest, total)
            result = result * share[:, None]
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        out = results_ptr + place[:, None] * D + column[None, :]
        tl.store(out, result.to(results_ptr.dtype.element_ty), mask=is_real)
    else:
        part = place * SPLITS + tl.program_id(2)
        tl.store(results_ptr + part[:, None] * D + column[None, :], result, mask=is_real)
        tl.store(statistics_ptr + part * 2, highest, mask=row < num_rows)
        tl.store(statistics_ptr + part * 2 + 1, total, mask=row < num_rows)


@triton.jit
def _merge(
    results_ptr,  # [N * h, SPLITS, D] float32
    statistics_ptr,  # [N * h, SPLITS, 2] float32: highest score and sum of weights
    out_ptr,  # [N * h, D]
    sinks_ptr,  # [h], or None
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,  # parts whose loads are in flight together
    BLOCK_D: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One part after the other, as a program of _attend adds them that has met them all."""
    if OVERLAPS:
        wait()
    first = tl.program_id(0).to(tl.int64) * SPLITS
    column = tl.arange(0, BLOCK_D)
    splits = tl.arange(0, PADDED_SPLITS)
    peaks = statistics_ptr + (first + splits) * 2
    highest = tl.max(tl.load(peaks, mask=splits < SPLITS, other=LOWEST), axis=0)
    total = tl.zeros((1,), dtype=tl.float32)
    result = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for chunk in range(0, SPLITS, CHUNK):
        for offset in tl.static_range(CHUNK):
            split = chunk + offset + tl.arange(0, 1)
            part, is_there = first + split, split < SPLITS
            peak = tl.load(statistics_ptr + part * 2, mask=is_there, other=LOWEST)
            weight = tl.load(statistics_ptr + part * 2 + 1, mask=is_there, other=0.0)
            row = results_ptr + part * D + column
            partial = tl.load(row, mask=is_there & (column < D), other=0.0)
            share = _power_of_two(peak - highest)
            result += partial * share
            total += weight * share
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + tl.program_id(0) % HEADS + tl.arange(0, 1))
        share, total = _with_sink(sink, highest, total)
        result = result * share
    result = result / tl.where(total > 0.0, total, 1.0)
    place = tl.program_id(0).to(tl.int64) * D + column
    tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=column < D)

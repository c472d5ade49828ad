"""Trees of drafts, without a look at the host: candidates, the best nodes, the target's walk.

The reference is kernels/reference/trees.py. A tree's numbers fit in one program's registers; what
must be looked up by a number that was just computed goes through memory, behind a barrier.

Shapes: B slots of the step, N nodes, K depths, M candidates at each depth, R rows of logits, V
columns in C chunks, P candidates of a tree in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.device_batch import DeviceBatch, StepCounts
from peagle.kernels.gpu.argmax import best, find_peaks
from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.gpu.sampling import (
    THRESHOLD_BLOCK,
    chunk_scores,
    dense,
    find_thresholds,
)
from peagle.kernels.reference.sampling import SamplingMetadata
from peagle.kernels.reference.trees import BeamRows, Candidates, SharedRows, TreePath
from peagle.speculation.trees import num_candidates

_TOPS_CHUNK = 1024  # columns: what one warp reads at once
_RANKED_AT_ONCE = 32
_RANKED_SCORES = 512  # of all slots, at once: loads of a chunk wait for those of the one before
_ROW_COLUMNS = 512  # of a row that is copied
_NO_ROW = tl.constexpr(2**31 - 1)


def top_tokens(
    logits: Tensor,
    metadata: SamplingMetadata | None,
    ids: Tensor | None,
    count: int,
    *,
    filters: bool = True,
) -> Candidates:
    """As kernels/reference/trees.py. `count` is a power of two."""
    assert logits.stride(1) == 1
    (rows, vocab_size), chunk = logits.shape, _TOPS_CHUNK
    num_chunks = triton.cdiv(vocab_size, chunk)
    peaks = thresholds = None
    if metadata is not None:
        metadata = dense(metadata)
        chunks = find_peaks(logits, chunk)
        peaks = chunks.peaks
        if filters:
            thresholds = find_thresholds(logits, metadata, chunks, THRESHOLD_BLOCK)
    tops = logits.new_empty(rows, num_chunks, dtype=torch.float32)
    columns = logits.new_empty(rows, num_chunks, dtype=torch.int32)
    masses = torch.empty_like(tops)
    sampled: tuple[Tensor | None, ...] = (None,) * 3
    if metadata is not None:
        sampled = metadata.temperature, metadata.seeds, metadata.positions
    row = logits, logits.stride(0), vocab_size, peaks, *sampled, *(thresholds or (None, None)), ids
    sizes = {"CHUNK": chunk, "CHUNKS": triton.next_power_of_2(num_chunks)}
    chunk_tops_kernel[(rows, num_chunks)](*row, tops, columns, masses, **sizes, **overlapping())
    token_ids = logits.new_empty(rows, count, dtype=torch.int64)
    log_probs = logits.new_empty(rows, count, dtype=torch.float32)
    row_tops_kernel[(rows,)](
        *row,
        tops,
        columns,
        masses,
        token_ids,
        log_probs,
        num_chunks,
        COUNT=count,
        num_warps=1,  # all its reductions stay within one
        **sizes,
        **overlapping(),
    )
    return Candidates(token_ids, log_probs)


@triton.jit
def _scores(
    logits, row_stride, vocab_size, peaks, temperatures, seeds, positions, thresholds,
    last_columns, ids, row, chunk, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Of one chunk, -inf where a token cannot be a candidate; and their columns."""
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + cols, mask=cols < vocab_size, other=float("-inf"))
    score = x.to(tl.float32)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            score, cols = chunk_scores(
                logits, row_stride, vocab_size, peaks, temperature, seeds, positions, thresholds,
                last_columns, ids, row, chunk, num_chunks, CHUNK, CHUNKS,
            )  # fmt: skip
    return tl.where(score == score, score, float("-inf")), cols


@triton.jit
def chunk_tops_kernel(
    logits, row_stride, vocab_size, peaks, temperatures, seeds, positions, thresholds,
    last_columns, ids, tops, columns, masses,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (R, C). The best score of each chunk, its column, and the chunk's sum of exponentials
    relative to it.

    tops, columns, masses  # [R, C]
    peaks                  # [R, C]; None, with temperatures, seeds, positions: all are greedy
    """
    if OVERLAPS:
        wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    score, cols = _scores(
        logits, row_stride, vocab_size, peaks, temperatures, seeds, positions, thresholds,
        last_columns, ids, row, chunk, num_chunks, CHUNK, CHUNKS,
    )  # fmt: skip
    at = row * num_chunks + chunk
    top, column = best(score, cols)
    base = tl.where(top > float("-inf"), top, 0.0)
    tl.store(tops + at, top)
    tl.store(columns + at, column)
    tl.store(masses + at, tl.sum(tl.exp(score - base), 0))


@triton.jit
def row_tops_kernel(
    logits, row_stride, vocab_size, peaks, temperatures, seeds, positions, thresholds,
    last_columns, ids, tops, columns, masses, token_ids, log_probs, num_chunks,
    COUNT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (R,). The best of the chunks' best, COUNT times; the chunk that had it is read again
    for its next best, so no chunk is ever sorted.

    token_ids, log_probs  # [R, COUNT]
    """
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNKS)
    inside = place < num_chunks
    at = row * num_chunks + place
    top = tl.load(tops + at, mask=inside, other=float("-inf"))
    column = tl.load(columns + at, mask=inside, other=0)
    mass = tl.load(masses + at, mask=inside, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest > float("-inf"), highest, 0.0)
    total = base + tl.log(tl.sum(mass * tl.exp(top - base), 0))
    for rank in tl.static_range(COUNT):
        value, chunk = best(top, place)
        found = tl.sum(tl.where(place == chunk, column, 0), 0)
        token = tl.minimum(found, vocab_size - 1).to(tl.int64)
        if ids is not None:
            token = tl.load(ids + token).to(tl.int64)
        tl.store(token_ids + row * COUNT + rank, token)
        tl.store(log_probs + row * COUNT + rank, value - total)
        if rank + 1 < COUNT:
            score, cols = _scores(
                logits, row_stride, vocab_size, peaks, temperatures, seeds, positions, thresholds,
                last_columns, ids, row, chunk, num_chunks, CHUNK, CHUNKS,
            )  # fmt: skip
            comes_later = (score < value) | ((score == value) & (cols > found))
            next_value, next_column = best(tl.where(comes_later, score, float("-inf")), cols)
            top = tl.where(place == chunk, next_value, top)
            column = tl.where(place == chunk, next_column, column)


def store_tree(
    state: DeviceBatch,
    slots: Tensor,
    token_ids: Tensor,
    log_probs: Tensor,
    num_depths: Tensor,
    num_nodes: int,
) -> None:
    """As kernels/reference/trees.py."""
    assert state.trees is not None
    by_path = token_ids.dim() == 4
    if not by_path:
        token_ids = token_ids[:, :, None].expand_as(log_probs)
    assert log_probs.stride(3) == token_ids.stride(3) == 1
    batch, depth, beam, _ = log_probs.shape
    pool = num_candidates(depth, beam)
    num_nodes = min(num_nodes, pool)  # few depths have fewer candidates
    scores = log_probs.new_empty(batch, pool)
    parents = log_probs.new_empty(batch, pool, dtype=torch.int32)
    rows = parents.new_empty(batch, pool + 1)
    store_tree_kernel[(batch,)](
        slots,
        token_ids,
        *token_ids.stride()[:3],
        log_probs,
        *log_probs.stride()[:3],
        num_depths,
        scores,
        parents,
        rows,
        state.drafts,
        *state.trees,
        state.draft_scores,
        state.num_drafts,
        depth,
        pool,
        num_nodes,
        state.drafts.shape[1],
        BY_PATH=by_path,
        BEAM=beam,
        POOL=triton.next_power_of_2(pool),
        ROWS=triton.next_power_of_2(num_nodes + 1),
        CHUNK=_RANKED_AT_ONCE,
        JUMPS=depth.bit_length(),
        num_warps=8,
        **overlapping(),
    )


def extend_beam(
    beam: BeamRows | None, token_ids: Tensor, log_probs: Tensor, parents: Tensor, first_row: int
) -> BeamRows:
    """As kernels/reference/trees.py. M is a power of two."""
    batch, width, size = token_ids.shape
    out = torch.empty(3, batch, size, dtype=torch.int64, device=token_ids.device)
    scores = log_probs.new_empty(batch, size)
    extend_beam_kernel[(batch,)](
        *((None, None) if beam is None else (beam.scores, beam.ancestors)),
        token_ids.contiguous(),
        log_probs.contiguous(),
        scores,
        out,
        parents,
        parents.stride(0),
        first_row,
        WIDTH=width,
        BEAM=size,
        num_warps=1,
        **overlapping(),
    )
    return BeamRows(scores, *out.unbind(0))


@triton.jit
def extend_beam_kernel(
    beam_scores, beam_ancestors, token_ids, log_probs, scores, out, parents, parents_stride,
    first_row, WIDTH: tl.constexpr, BEAM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B,).

    beam_scores, beam_ancestors  # [B, WIDTH]; None: WIDTH is 1, and nothing comes before
    token_ids, log_probs         # [B, WIDTH, BEAM]
    out                          # [3, B, BEAM]: tokens, paths, ancestors
    """
    if OVERLAPS:
        wait()
    b, batch = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    beam, square = tl.arange(0, BEAM), tl.arange(0, WIDTH * BEAM)
    sums = tl.load(log_probs + b * WIDTH * BEAM + square)
    sums = tl.minimum(tl.where(sums == sums, sums, float("-inf")), 0.0)
    rank = square
    if beam_scores is not None:
        sums += tl.load(beam_scores + b * WIDTH + square // BEAM)
        before = _comes_before(sums[None, :], square[None, :], sums[:, None], square[:, None])
        rank = tl.sum(before.to(tl.int32), 1)
    goes_on = rank[None, :] == beam[:, None]  # [BEAM, WIDTH * BEAM]
    places = tl.sum(tl.where(goes_on, square[None, :], 0), 1)
    path = places // BEAM
    row = first_row + beam
    bits = tl.full((BEAM,), 1, tl.int64)
    parent = tl.zeros((BEAM,), dtype=tl.int64)
    if beam_ancestors is not None:
        bits = tl.load(beam_ancestors + b * WIDTH + path)
        parent = (first_row - WIDTH + path).to(tl.int64)
    own = tl.full((BEAM,), 1, tl.int64) << row.to(tl.int64)
    at = b * BEAM + beam
    tl.store(scores + at, tl.sum(tl.where(goes_on, sums[None, :], 0.0), 1))
    tl.store(out + at, tl.load(token_ids + b * WIDTH * BEAM + places))
    tl.store(out + batch * BEAM + at, path.to(tl.int64))
    tl.store(out + 2 * batch * BEAM + at, bits | own)
    tl.store(parents + b * parents_stride + row - 1, parent)


@triton.jit
def _level(log_probs, depth_stride, before_stride, depth, before, num_depths, BEAM: tl.constexpr):
    """The log-probabilities of one depth behind these candidates of the depth before; -inf beyond
    the depths that the slot drafts.  # before [n] -> [n, BEAM]"""
    rows = log_probs + depth * depth_stride + before * before_stride
    x = tl.load(rows[:, None] + tl.arange(0, BEAM)[None, :])
    x = tl.where((x == x) & (depth < num_depths), x, float("-inf"))
    return tl.minimum(x, 0.0)


@triton.jit
def _comes_before(other, other_place, score, place):
    """In falling order, the earlier of equal ones first."""
    return (other > score) | ((other == score) & (other_place < place))


@triton.jit
def store_tree_kernel(
    slots,
    token_ids,
    tokens_batch_stride,
    tokens_depth_stride,
    tokens_before_stride,
    log_probs,
    batch_stride,
    depth_stride,
    before_stride,
    num_depths,
    pool_scores,
    pool_parents,
    pool_rows,
    drafts,
    parents,
    depths,
    ancestors,
    draft_scores,
    num_drafts,
    depth,
    pool,
    num_nodes,
    width,
    BY_PATH: tl.constexpr,
    BEAM: tl.constexpr,
    POOL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    JUMPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (B,). Candidates of depth d stand behind those of the depths before, M of the first and
    M * M of each other: continuation m of path w of the beam at w * M + m.

    pool_scores, pool_parents  # [B, P] scratch
    pool_rows                  # [B, P + 1] scratch
    draft_scores               # [L, width], or None where nobody reads them
    """
    if OVERLAPS:
        wait()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b)
    drafted = tl.load(num_depths + b)
    token_ids += b * tokens_batch_stride
    log_probs += b * batch_stride
    pool_scores += b * pool
    pool_parents += b * pool
    pool_rows += b * (pool + 1)

    # 1. The beam: every continuation goes into the pool, the best go on.
    beam = tl.arange(0, BEAM)
    # Depth 1 is the same behind all: the diagonal of a square that repeats itself.
    first_level = _level(log_probs, depth_stride, before_stride, 0, beam, drafted, BEAM)
    beam_scores = tl.sum(tl.where(beam[:, None] == beam[None, :], first_level, 0.0), 0)
    beam_places = beam
    last = beam  # the candidate at the end of each path; by path, the path itself
    tl.store(pool_scores + beam, beam_scores)
    tl.store(pool_parents + beam, tl.full((BEAM,), -1, tl.int32))
    square = tl.arange(0, BEAM * BEAM)
    ahead = tl.minimum(1, depth - 1)
    next_level = _level(log_probs, depth_stride, before_stride, ahead, beam, drafted, BEAM)
    for d in range(1, depth):
        first = BEAM + (d - 1) * BEAM * BEAM
        behind = next_level
        # Whole, and a depth ahead: then no load waits for the paths that it is for.
        ahead = tl.minimum(d + 1, depth - 1)
        next_level = _level(log_probs, depth_stride, before_stride, ahead, beam, drafted, BEAM)
        if not BY_PATH:
            is_last = last[:, None] == beam[None, :]  # [paths, candidates]
            behind = tl.sum(tl.where(is_last[:, :, None], behind[None, :, :], 0.0), 1)
        sums = beam_scores[:, None] + behind
        sums = tl.reshape(sums, (BEAM * BEAM,))
        from_places = tl.broadcast_to(beam_places[:, None], (BEAM, BEAM))
        tl.store(pool_scores + first + square, sums)
        tl.store(pool_parents + first + square, tl.reshape(from_places, (BEAM * BEAM,)))
        before = _comes_before(sums[None, :], square[None, :], sums[:, None], square[:, None])
        rank = tl.sum(before.to(tl.int32), 1)
        goes_on = rank[None, :] == beam[:, None]  # [BEAM, BEAM * BEAM]
        beam_scores = tl.sum(tl.where(goes_on, sums[None, :], 0.0), 1)
        best_squares = tl.sum(tl.where(goes_on, square[None, :], 0), 1)
        beam_places = first + best_squares
        if not BY_PATH:
            last = best_squares % BEAM
    tl.debug_barrier()

    # 2. The nodes are the best of the pool; a candidate's rank is its row.
    place = tl.arange(0, POOL)
    in_pool = place < pool
    score = tl.load(pool_scores + place, mask=in_pool, other=float("-inf"))
    rank = tl.zeros((POOL,), dtype=tl.int32)
    for chunk in range(0, pool, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        theirs = tl.load(pool_scores + other, mask=other < pool, other=float("-inf"))
        before = _comes_before(theirs[None, :], other[None, :], score[:, None], place[:, None])
        rank += tl.sum((before & (other < pool)[None, :]).to(tl.int32), 1)
    is_node = in_pool & (rank < num_nodes)
    level = tl.where(place < BEAM, 0, 1 + (place - BEAM) // (BEAM * BEAM))
    path = tl.where(level > 0, (place - BEAM) // BEAM % BEAM, 0)
    own_token = token_ids + level * tokens_depth_stride + path * tokens_before_stride
    token = tl.load(own_token + place % BEAM, mask=is_node, other=0)
    tl.store(drafts + slot * width + rank, token, mask=is_node)
    tl.store(depths + slot * (width + 1) + rank + 1, (level + 1).to(tl.int64), mask=is_node)
    if draft_scores is not None:
        tl.store(draft_scores + slot * width + rank, score, mask=is_node)
    tl.store(pool_rows + place, rank + 1, mask=in_pool)
    there = tl.sum((is_node & (score > float("-inf"))).to(tl.int64), 0)
    tl.store(num_drafts + slot, tl.minimum(tl.load(num_drafts + slot), there))
    tl.debug_barrier()

    # 3. Parents as rows.
    parent = tl.load(pool_parents + place, mask=is_node, other=-1)
    row_of_parent = tl.load(pool_rows + tl.maximum(parent, 0), mask=is_node, other=0)
    parent_row = tl.where(parent < 0, 0, row_of_parent).to(tl.int64)
    tl.store(parents + slot * width + rank, parent_row, mask=is_node)
    tl.debug_barrier()

    # 4. Ancestors: each jump doubles how far up a row has looked.
    row = tl.arange(0, ROWS)
    is_row = row <= num_nodes
    up = tl.load(parents + slot * width + row - 1, mask=is_row & (row > 0), other=0).to(tl.int32)
    bits = tl.full((ROWS,), 1, tl.int64) << row.to(tl.int64)
    for _ in range(JUMPS):
        tl.store(ancestors + slot * (width + 1) + row, bits, mask=is_row)
        tl.store(pool_rows + row, up, mask=is_row)
        tl.debug_barrier()
        bits |= tl.load(ancestors + slot * (width + 1) + up, mask=is_row, other=0)
        up = tl.load(pool_rows + up, mask=is_row, other=0)
        tl.debug_barrier()
    tl.store(ancestors + slot * (width + 1) + row, bits, mask=is_row)


def share_rows(
    state: DeviceBatch, slots: Tensor, counts: StepCounts, num_rows: int
) -> tuple[StepCounts, SharedRows]:
    """As kernels/reference/trees.py."""
    assert state.draft_scores is not None
    (batch, size), width = counts.drafts.shape, state.draft_scores.shape[1]
    ranks = torch.empty(batch, size + 1, dtype=torch.int64, device=slots.device)
    lengths = torch.empty(batch, dtype=torch.int32, device=slots.device)
    rank_rows_kernel[(batch,)](
        slots,
        state.draft_scores,
        counts.num_drafts,
        ranks,
        lengths,
        num_rows,
        size,
        width,
        ROWS=triton.next_power_of_2(size + 1),
        CHUNK=min(triton.next_power_of_2(batch * (size + 1)), _RANKED_SCORES),
        num_warps=8,
        **overlapping(),
    )
    starts = torch.empty(batch + 1, dtype=torch.int32, device=slots.device)
    index = torch.empty(num_rows, dtype=torch.int64, device=slots.device)
    left = torch.empty(2, batch, dtype=torch.int64, device=slots.device)
    give_rows_kernel[(batch,)](
        lengths,
        counts.num_drafts,
        counts.num_rows,
        starts,
        index,
        left,
        size,
        ROWS=triton.next_power_of_2(size + 1),
        SLOTS=triton.next_power_of_2(batch),
        num_warps=1,
        **overlapping(),
    )
    counts = counts._replace(num_drafts=left[0], num_rows=left[1])
    return counts, SharedRows(starts, index, ranks)


@triton.jit
def rank_rows_kernel(
    slots, scores, num_drafts, ranks, lengths, num_rows, size, width,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B,). A slot's rows among all: how many stand before each of them.

    ranks    # [B, N+1]
    lengths  # [B] how many are among the first `num_rows`
    """
    if OVERLAPS:
        wait()
    b, rows_per_slot = tl.program_id(0), size + 1
    row = tl.arange(0, ROWS)
    place = b * rows_per_slot + row
    is_row = row < rows_per_slot
    score = _row_scores(slots, scores, num_drafts, tl.full((ROWS,), b, tl.int32), row, size, width)
    rank = tl.zeros((ROWS,), dtype=tl.int32)
    total = tl.num_programs(0) * rows_per_slot
    for chunk in range(0, total, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        is_other = other < total
        slot = tl.where(is_other, other // rows_per_slot, 0)
        theirs = _row_scores(slots, scores, num_drafts, slot, other % rows_per_slot, size, width)
        before = _comes_before(theirs[None, :], other[None, :], score[:, None], place[:, None])
        rank += tl.sum((before & is_other[None, :]).to(tl.int32), 1)
    tl.store(ranks + place, rank.to(tl.int64), mask=is_row)
    tl.store(lengths + b, tl.sum((is_row & (rank < num_rows)).to(tl.int32), 0))


@triton.jit
def _row_scores(slots, scores, num_drafts, b, row, size, width):
    """Of rows of slots b of the step: a newest token comes before all drafts, behind them what is
    none."""
    slot = tl.load(slots + b)
    is_draft = (row > 0) & (row <= size) & (row <= tl.load(num_drafts + b))
    score = tl.load(scores + slot * width + row - 1, mask=is_draft, other=float("-inf"))
    return tl.where(row == 0, float("inf"), score)


@triton.jit
def give_rows_kernel(
    lengths, num_drafts, num_rows, starts, index, left, size,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B,). A slot's rows stand behind those of the slots before it.

    left  # [2, B]: drafts and rows that each slot goes on with
    """
    if OVERLAPS:
        wait()
    b, batch = tl.program_id(0), tl.num_programs(0)
    slot, row = tl.arange(0, SLOTS), tl.arange(0, ROWS)
    start = tl.sum(tl.load(lengths + slot, mask=slot < b, other=0), 0)
    length = tl.load(lengths + b)
    tl.store(starts + b, start)
    tl.store(starts + batch, start + length, mask=b == batch - 1)
    places = b * (size + 1) + row
    tl.store(index + start + row, places.to(tl.int64), mask=row < length)
    drafted = tl.minimum(tl.load(num_drafts + b), (length - 1).to(tl.int64))
    tl.store(left + b, drafted)
    tl.store(left + batch + b, tl.where(tl.load(num_rows + b) > 0, drafted + 1, 0))


def best_chain(token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """As speculation/trees.py."""
    assert log_probs.stride(3) == 1
    batch, depth, beam = token_ids.shape
    chain = torch.empty(batch, depth, dtype=torch.int64, device=token_ids.device)
    best_chain_kernel[(batch,)](
        token_ids.contiguous(),
        log_probs,
        *log_probs.stride()[:3],
        chain,
        depth,
        BEAM=beam,
        num_warps=1,
        **overlapping(),
    )
    return chain


@triton.jit
def best_chain_kernel(
    token_ids, log_probs, batch_stride, depth_stride, before_stride, chain, depth,
    BEAM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    if OVERLAPS:
        wait()
    b = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BEAM)
    last = tl.full((), 0, tl.int32)
    for d in range(depth):
        row = log_probs + b * batch_stride + d * depth_stride + last * before_stride
        x = tl.load(row + candidate)
        _, last = best(tl.where(x == x, tl.minimum(x, 0.0), float("-inf")), candidate)
        last = tl.minimum(last, BEAM - 1)
        tl.store(chain + b * depth + d, tl.load(token_ids + (b * depth + d) * BEAM + last))


def walk_tree(
    counts: StepCounts,
    sampled: Tensor,
    usable: Tensor,
    depth: int,
    shared: SharedRows | None = None,
) -> TreePath:
    """As kernels/reference/trees.py."""
    assert counts.tree is not None
    batch, num_nodes = counts.drafts.shape
    out = torch.empty(2, batch, depth + 1, dtype=torch.int64, device=sampled.device)
    path_usable = torch.empty(batch, depth + 1, dtype=torch.int8, device=sampled.device)
    drafts = torch.empty(batch, depth, dtype=torch.int64, device=sampled.device)
    tokens, rows = out.unbind(0)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=sampled.device)
    width = (1 if shared is None else 2) * depth + 1
    report = torch.empty(batch, width, dtype=torch.int64, device=sampled.device)
    walk_tree_kernel[(batch,)](
        counts.drafts,
        counts.tree.parents,
        counts.num_drafts,
        sampled.contiguous(),
        usable.contiguous().view(torch.int8),
        *((None, None) if shared is None else (shared.starts, shared.ranks)),
        drafts,
        tokens,
        rows,
        path_usable,
        num_accepted,
        report,
        depth,
        num_nodes,
        width,
        ROWS=triton.next_power_of_2(num_nodes + 1),
        num_warps=1,
        **overlapping(),
    )
    return TreePath(drafts, tokens, path_usable.view(torch.bool), rows, num_accepted, report)


@triton.jit
def walk_tree_kernel(
    node_tokens, parents, num_drafts, sampled, usable, row_starts, ranks, drafts, path_tokens,
    path_rows, path_usable, num_accepted, report, depth, num_nodes, width, ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B,).

    row_starts, ranks                    # [B + 1], [B, N+1] where slots share rows, or None
    path_tokens, path_rows, path_usable  # [B, K+1]
    report                               # [B, K or 2 K, and 1]
    """
    if OVERLAPS:
        wait()
    b = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    is_row, is_node = row <= num_nodes, (row > 0) & (row <= num_nodes)
    first, is_sampled = b * (num_nodes + 1), is_row
    if row_starts is not None:
        first = tl.load(row_starts + b).to(tl.int64)
        is_sampled = is_row & (row < tl.load(row_starts + b + 1) - first)
    choice = tl.load(sampled + first + row, mask=is_sampled, other=-1)
    is_usable = tl.load(usable + first + row, mask=is_sampled, other=0)
    token = tl.load(node_tokens + b * num_nodes + row - 1, mask=is_node, other=-2)
    parent = tl.load(parents + b * num_nodes + row - 1, mask=is_node, other=-1)
    is_there = is_node & (row <= tl.load(num_drafts + b))
    size = depth + 1
    here = tl.full((), 0, tl.int32)
    taken = tl.full((), 0, tl.int64)
    for d in range(size):
        wanted = tl.sum(tl.where(row == here, choice, 0), 0)
        may_use = tl.sum(tl.where(row == here, is_usable, 0).to(tl.int32), 0)
        tl.store(path_tokens + b * size + d, wanted)
        tl.store(path_rows + b * size + d, here.to(tl.int64))
        is_draft = d > 0
        tl.store(report + b * width + d - 1, here.to(tl.int64), mask=is_draft)
        if ranks is not None:
            rank = tl.load(ranks + b * (num_nodes + 1) + here) - tl.num_programs(0)
            tl.store(report + b * width + depth + d - 1, rank, mask=is_draft)
        tl.store(path_usable + b * size + d, may_use.to(tl.int8))
        carries = is_there & (parent == here) & (token == wanted)
        child = tl.min(tl.where(carries, row, _NO_ROW), 0)
        found = (child < _NO_ROW) & (d < depth)
        tl.store(drafts + b * depth + d, tl.where(found, wanted, -1), mask=d < depth)
        taken += found.to(tl.int64)
        here = tl.where(found, child, here)
    tl.store(num_accepted + b, taken)
    children = tl.sum((is_there & (parent == here)).to(tl.int32), 0)
    tl.store(report + b * width + width - 1, (children == 0).to(tl.int64))


def move_rows(
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    starts: Tensor,
    path: TreePath,
    block_size: int,
) -> None:
    """As kernels/reference/trees.py."""
    layers, cache_slots, kv_heads, dim = keys.shape
    batch, size = path.rows.shape
    move_rows_kernel[(batch, layers, 2)](
        keys,
        values,
        block_tables,
        slots,
        starts,
        path.rows,
        path.rows.stride(0),
        path.num_accepted,
        cache_slots * kv_heads * dim,
        block_tables.stride(0),
        block_size,
        size,
        ROW_SIZE=kv_heads * dim,
        ROWS=triton.next_power_of_2(size),
        COLUMNS=min(triton.next_power_of_2(kv_heads * dim), _ROW_COLUMNS),
        **overlapping(),
    )


@triton.jit
def move_rows_kernel(
    keys, values, block_tables, slots, starts, rows, rows_stride, num_accepted, layer_size,
    table_stride, block_size, size, ROW_SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B, layers, keys or values). All rows are read before any is written: one's place may be
    another's source."""
    if OVERLAPS:
        wait()
    b, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cache = keys
    if tl.program_id(2) == 1:
        cache = values
    place = tl.arange(0, ROWS)
    row = tl.load(rows + b * rows_stride + place, mask=place < size, other=0)
    moves = (place < size) & (place <= tl.load(num_accepted + b)) & (row != place)
    table = block_tables + tl.load(slots + b) * table_stride
    start = tl.load(starts + b)
    source, target = start + row, start + place
    source_block = tl.load(table + source // block_size, mask=moves, other=0).to(tl.int64)
    target_block = tl.load(table + target // block_size, mask=moves, other=0).to(tl.int64)
    source = layer * layer_size + (source_block * block_size + source % block_size) * ROW_SIZE
    target = layer * layer_size + (target_block * block_size + target % block_size) * ROW_SIZE
    for first in range(0, ROW_SIZE, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = moves[:, None] & (column < ROW_SIZE)[None, :]
        x = tl.load(cache + source[:, None] + column[None, :], mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(cache + target[:, None] + column[None, :], x, mask=inside)


def path_rows(
    x: Tensor, rows: Tensor, rows_per_slot: int, row_starts: Tensor | None = None
) -> Tensor:
    """As kernels/reference/trees.py."""
    assert x.is_contiguous()
    (batch, count), columns = rows.shape, x.shape[1]
    out = x.new_empty(batch * count, columns)
    path_rows_kernel[(batch * count, triton.cdiv(columns, _ROW_COLUMNS))](
        x,
        rows,
        rows.stride(0),
        row_starts,
        out,
        count,
        rows_per_slot,
        columns,
        COLUMNS=_ROW_COLUMNS,
        **overlapping(),
    )
    return out


@triton.jit
def path_rows_kernel(
    x, rows, rows_stride, row_starts, out, count, rows_per_slot, columns, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B * n, tiles of columns)."""
    if OVERLAPS:
        wait()
    place = tl.program_id(0).to(tl.int64)
    slot = place // count
    first = slot * rows_per_slot
    if row_starts is not None:
        first = tl.load(row_starts + slot).to(tl.int64)
    row = first + tl.load(rows + slot * rows_stride + place % count)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    tl.store(
        out + place * columns + column,
        tl.load(x + row * columns + column, mask=inside),
        mask=inside,
    )

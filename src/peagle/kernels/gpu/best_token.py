"""The best token of each row straight from its hidden state: no logits are written.

Of 1,024 rows and 49,152 tokens the float32 logits are 201 MB, written only to be read once more.
Here a program multiplies a tile of rows with a tile of the output table and keeps of each row the
largest sum and its column; argmax.py's merge does the rest. A sum is one
chain (linear.py): a row has the same bits alone and beside others.

Shapes: R rows, H hidden, V tokens in C tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.argmax import Chunks, merge
from peagle.kernels.gpu.linear import LinearTile, output_tile
from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.policy import HALF
from peagle.kernels.reference.sampling import SampledTokens


def best_tokens(hidden: Tensor, weight: Tensor, ids: Tensor | None) -> SampledTokens:
    """As kernels/reference/best_token.py."""
    return best_tokens_in_tiles(hidden, weight, ids, output_tile(hidden.shape[0]))


def best_tokens_in_tiles(
    hidden: Tensor, weight: Tensor, ids: Tensor | None, block: LinearTile
) -> SampledTokens:
    """`best_tokens` with the product cut so; no token depends on it but by the order of sums."""
    chunks = _find_peaks(hidden, weight, block)
    return merge(chunks, chunks.peaks, chunks.columns, ids)


def _find_peaks(hidden: Tensor, weight: Tensor, block: LinearTile) -> Chunks:
    (rows, inputs), vocab_size = hidden.shape, weight.shape[0]
    assert weight.shape[1] == inputs
    assert hidden.dtype == weight.dtype
    assert hidden.dtype in HALF
    assert hidden.is_contiguous()
    assert weight.is_contiguous()
    shape = (rows, triton.cdiv(vocab_size, block.outputs))
    peaks = hidden.new_empty(shape, dtype=torch.float32)
    columns = hidden.new_empty(shape, dtype=torch.int32)
    # Tiles of rows come first: programs that run together read the same few pieces of the table,
    # which comes from memory once. All rows together stay in the cache.
    grid = (triton.cdiv(rows, block.rows), shape[1])
    product_peaks_kernel[grid](
        hidden,
        weight,
        peaks,
        columns,
        rows,
        INPUTS=inputs,
        VOCAB_SIZE=vocab_size,
        BLOCK_ROWS=block.rows,
        BLOCK_COLUMNS=block.outputs,
        BLOCK_INPUTS=block.inputs,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlapping(),
    )
    return Chunks(peaks, columns, block.outputs)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["num_rows"])
def product_peaks_kernel(
    hidden_ptr,
    weight_ptr,
    peaks_ptr,
    columns_ptr,
    num_rows,
    INPUTS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Grid (row tiles, C). peaks, columns  # [R, C]; a tile with a NaN has the peak NaN."""
    if OVERLAPS:
        wait()
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # Beyond the end the last row and column are read again: no mask is needed. Of the last column
    # and its copies the lowest is the real one.
    read_rows = tl.minimum(rows, num_rows - 1).to(tl.int64)
    read_columns = tl.minimum(columns, VOCAB_SIZE - 1).to(tl.int64)
    hidden_rows = hidden_ptr + read_rows[:, None] * INPUTS
    weight_rows = weight_ptr + read_columns[:, None] * INPUTS

    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, BLOCK_INPUTS):
        k = start + tl.arange(0, BLOCK_INPUTS)[None, :]
        if INPUTS % BLOCK_INPUTS == 0:
            part = tl.load(hidden_rows + k)
            weights = tl.load(weight_rows + k)
        else:
            part = tl.load(hidden_rows + k, mask=k < INPUTS, other=0.0)
            weights = tl.load(weight_rows + k, mask=k < INPUTS, other=0.0)
        total = tl.dot(part, tl.trans(weights), total)

    peaks = tl.reduce(total, 1, _larger)
    # A NaN equals nothing: such a tile names the last column, never used but looked up in `ids`.
    best = tl.min(tl.where(total == peaks[:, None], columns[None, :], VOCAB_SIZE - 1), 1)
    at = rows.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks_ptr + at, peaks, mask=rows < num_rows)
    tl.store(columns_ptr + at, best, mask=rows < num_rows)

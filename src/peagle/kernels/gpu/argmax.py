"""The largest value of each row, by many programs: the best of each chunk, then the best of these.

A maximum has no rounding, so neither the chunks nor the number of rows can change a result.
Shapes: R rows, V columns, C chunks of a row (padded to CHUNKS, a power of two).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.reference.sampling import SampledTokens

_NO_COLUMN = tl.constexpr(2**31 - 1)


class Chunks(NamedTuple):
    """The largest logit of each chunk and its column; how a row is cut."""

    peaks: Tensor  # [R, C] float32, NaN where the chunk has one
    columns: Tensor  # [R, C] int32
    size: int

    @property
    def padded(self) -> int:
        return int(triton.next_power_of_2(self.peaks.shape[1]))


def find_peaks(logits: Tensor, chunk: int) -> Chunks:
    assert logits.stride(1) == 1
    rows, vocab_size = logits.shape
    shape = (rows, triton.cdiv(vocab_size, chunk))
    peaks = logits.new_empty(shape, dtype=torch.float32)
    columns = logits.new_empty(shape, dtype=torch.int32)
    peaks_kernel[shape](
        logits,
        logits.stride(0),
        vocab_size,
        peaks,
        columns,
        CHUNK=chunk,
        **overlapping(),
    )
    return Chunks(peaks, columns, chunk)


def merge(chunks: Chunks, values: Tensor, columns: Tensor, ids: Tensor | None) -> SampledTokens:
    rows, num_chunks = values.shape
    tokens = columns.new_empty(rows, dtype=torch.int64)
    usable = columns.new_empty(rows, dtype=torch.int8)
    merge_kernel[(rows,)](
        chunks.peaks,
        values,
        columns,
        ids,
        tokens,
        usable,
        num_chunks,
        CHUNKS=chunks.padded,
        **overlapping(),
    )
    return SampledTokens(tokens, usable.view(torch.bool))


@triton.jit
def best(values, columns):
    """The largest value and the lowest column that has it; none of the values may be NaN."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, columns, _NO_COLUMN), 0)


@triton.jit
def without_nan(x):
    return tl.where(x != x, float("-inf"), x)


@triton.jit
def row_peak(peaks, row, num_chunks, CHUNKS: tl.constexpr):
    """The row's largest logit from those of its chunks, and whether it may be used: not where any
    logit is NaN, where it is +inf, or where all are -inf."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    x = tl.load(peaks + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    num_broken = tl.sum((x != x).to(tl.int32), 0)
    peak = tl.max(without_nan(x), 0)
    return peak, (num_broken == 0) & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def peaks_kernel(
    logits, row_stride, vocab_size, peaks, columns, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr
):
    """Grid (R, C). peaks, columns  # [R, C]; a chunk with a NaN has the peak NaN."""
    if OVERLAPS:
        wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = cols < vocab_size
    x = tl.load(logits + row * row_stride + cols, mask=inside, other=float("-inf")).to(tl.float32)
    num_broken = tl.sum((x != x).to(tl.int32), 0)
    top, column = best(without_nan(x), cols)
    at = row * tl.num_programs(1) + chunk
    tl.store(peaks + at, tl.where(num_broken > 0, float("nan"), top))
    tl.store(columns + at, column)


@triton.jit
def merge_kernel(
    peaks, values, columns, ids, token_ids, usable, num_chunks,
    CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (R,). values, columns  # [R, C] the best of each chunk -> token_ids, usable  # [R]"""
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    _, row_usable = row_peak(peaks, row, num_chunks, CHUNKS)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row * num_chunks + chunks
    x = tl.load(values + at, mask=inside, other=float("-inf"))
    chunk_columns = tl.load(columns + at, mask=inside, other=_NO_COLUMN)
    _, column = best(without_nan(x), chunk_columns)
    token = column.to(tl.int64)
    if ids is not None:
        token = tl.load(ids + column).to(tl.int64)
    tl.store(token_ids + row, tl.where(row_usable, token, 0))
    tl.store(usable + row, row_usable.to(tl.int8))

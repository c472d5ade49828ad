"""The law of each row's token, written out for rejection: a softmax over what the filters keep.

Two kernels: the mass of each chunk of a row, then every token's share of their sum. Rows that are
not drawn (greedy, or not usable) have a law of one token.

Shapes: R rows, V columns of logits, C chunks of a row, P chunks whose peaks are known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.gpu.argmax import row_peak
from peagle.kernels.gpu.borders import below_peak


@triton.jit
def _weights(logits, cols, vocab_size, heat, raw_peak, row, borders, last_columns):
    """Probabilities relative to the most likely token's; 0 for those that a filter drops."""
    x = tl.load(logits + cols, mask=cols < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x, heat)
    weights = tl.exp(below_peak(scaled, tl.div_rn(raw_peak, heat)))
    if borders is not None:
        border = tl.load(borders + row)
        first_equal = cols <= tl.load(last_columns + row)
        kept = (scaled > border) | ((scaled == border) & first_equal)
        weights = tl.where(kept, weights, 0.0)
    return weights


@triton.jit
def masses_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    num_peaks,
    temperature,
    borders,
    last_columns,
    masses,
    CHUNK: tl.constexpr,
    PEAKS: tl.constexpr,
):
    """Grid (R, C). masses  # [R, C] float32, sums of weights; 0 of rows that are not drawn

    peaks                  # [R, P]
    borders, last_columns  # [R] or None: no filters
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    raw_peak, usable = row_peak(peaks, row, num_peaks, PEAKS)
    mass = tl.full((), 0.0, tl.float32)
    if (heat > 0) & usable:
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        row_logits = logits + row * row_stride
        weights = _weights(row_logits, cols, vocab_size, heat, raw_peak, row, borders, last_columns)
        mass = tl.sum(weights, 0)
    tl.store(masses + row * tl.num_programs(1) + chunk, mass)


@triton.jit
def laws_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    num_peaks,
    temperature,
    borders,
    last_columns,
    masses,
    token_ids,
    ids,
    laws,
    law_stride,
    CHUNK: tl.constexpr,
    PEAKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (R, C). Writes a chunk of a row's law to its tokens' places.

    token_ids  # [R] the one token of rows that are not drawn
    ids        # [V] the token of each column, or None: its own number
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = cols < vocab_size
    tokens = cols.to(tl.int64)
    if ids is not None:
        tokens = tl.load(ids + cols, mask=inside, other=0).to(tl.int64)
    heat = tl.load(temperature + row)
    raw_peak, usable = row_peak(peaks, row, num_peaks, PEAKS)
    only = tl.load(token_ids + row)
    law = (tokens == only).to(tl.float32)
    if (heat > 0) & usable:
        chunks = tl.arange(0, CHUNKS)
        mass = tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
        row_logits = logits + row * row_stride
        weights = _weights(row_logits, cols, vocab_size, heat, raw_peak, row, borders, last_columns)
        law = tl.div_rn(weights, tl.sum(mass, 0))
    elif ids is not None:
        # Token 0 of a row that is not usable may have no column.
        tl.store(laws + row * law_stride + only, tl.full((), 1.0, tl.float32))
    tl.store(laws + row * law_stride + tokens, law, mask=inside)

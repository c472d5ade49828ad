"""Sampling is an argmax of scores: filtered logits below the peak, plus Gumbel noise."""

from __future__ import annotations

import triton
import triton.language as tl

from peagle.kernels.gpu.argmax import best, row_peak
from peagle.kernels.gpu.borders import below_peak
from peagle.kernels.gpu.noise import gumbel, vocab_key


@triton.jit
def scores_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    peak_columns,
    temperature,
    seeds,
    positions,
    borders,
    last_columns,
    ids,
    scores,
    columns,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (R, C). The best score of each chunk and its column; a greedy row's score is its logit.

    peaks, peak_columns, scores, columns  # [R, C]
    borders, last_columns                 # [R] or None: no filters
    ids                                   # [V] or None
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    at = row * num_chunks + chunk
    heat = tl.load(temperature + row)
    top = tl.load(peaks + at)
    column = tl.load(peak_columns + at)
    if heat > 0:
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = cols < vocab_size
        x = tl.load(logits + row * row_stride + cols, mask=inside, other=float("-inf"))
        scaled = tl.div_rn(x.to(tl.float32), heat)
        raw_peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
        tokens = cols
        if ids is not None:
            tokens = tl.load(ids + cols, mask=inside, other=0).to(tl.int32)
        key = vocab_key(tl.load(seeds + row), tl.load(positions + row))
        score = below_peak(scaled, tl.div_rn(raw_peak, heat)) + gumbel(key, tokens)
        if borders is not None:
            border = tl.load(borders + row)
            first_equal = cols <= tl.load(last_columns + row)
            kept = (scaled > border) | ((scaled == border) & first_equal)
            score = tl.where(kept, score, float("-inf"))
        top, column = best(tl.where(inside & (score == score), score, float("-inf")), cols)
    tl.store(scores + at, top)
    tl.store(columns + at, column)

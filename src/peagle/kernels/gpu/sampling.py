"""One token per row of logits, greedy or sampled, with static shapes and no look at the host.

Sampling is an argmax of scores: filtered logits below the peak, plus Gumbel noise. Greedy alone is
2 kernels. Sampling adds one, filters another, probabilities two: the mass of each chunk of a row,
then every token's share of their sum. A row's token depends on nothing but its own logits and
sampling parameters. Against kernels/reference/sampling.py, gumbels and probabilities differ by a
few last bits, and thresholds of a nucleus as kernels/gpu/thresholds.py says.

Shapes: R rows, V columns of logits, C chunks of a row, P chunks whose peaks are known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.argmax import Chunks, best, find_peaks, merge, row_peak
from peagle.kernels.gpu.noise import gumbel, vocab_key
from peagle.kernels.gpu.thresholds import below_peak, thresholds_kernel
from peagle.kernels.reference.sampling import SampledTokens, SamplingMetadata, TokenProbs

# Few rows are cut finely, to occupy the whole device; no result depends on it.
_FINE_CHUNK, _COARSE_CHUNK, _ENOUGH_PROGRAMS = 1024, 2048, 2048
# Sums of mass do depend on these, so they are the same for any number of rows.
THRESHOLD_BLOCK, _PROBS_CHUNK = 4096, 1024


class Thresholds(NamedTuple):
    """A token stays if its scaled logit is above the value, or equal and not behind the column."""

    values: Tensor  # [R] float32
    last_columns: Tensor  # [R] int32


def sample_tokens(
    logits: Tensor,
    metadata: SamplingMetadata | None = None,
    ids: Tensor | None = None,
    *,
    filters: bool = True,
) -> SampledTokens:
    """As kernels/reference/sampling.py. `filters` False leaves the search for thresholds out."""
    return sample_in_chunks(logits, metadata, ids, filters, chunk_size(logits), THRESHOLD_BLOCK)


def sample_in_chunks(
    logits: Tensor,
    metadata: SamplingMetadata | None,
    ids: Tensor | None,
    filters: bool,
    chunk: int,
    block: int,
) -> SampledTokens:
    """`sample_tokens` with rows cut into chunks and blocks (powers of two) of these sizes."""
    chunks = find_peaks(logits, chunk)
    values, columns = chunks.peaks, chunks.columns
    if metadata is not None:
        metadata = dense(metadata)
        thresholds = find_thresholds(logits, metadata, chunks, block) if filters else None
        values, columns = _score(logits, metadata, ids, chunks, thresholds)
    return merge(chunks, values, columns, ids)


def sample_with_probs(
    logits: Tensor,
    metadata: SamplingMetadata,
    ids: Tensor | None,
    probs: Tensor,
    *,
    filters: bool = True,
) -> SampledTokens:
    """As kernels/reference/sampling.py."""
    metadata = dense(metadata)
    chunks = find_peaks(logits, chunk_size(logits))
    thresholds = find_thresholds(logits, metadata, chunks, THRESHOLD_BLOCK) if filters else None
    sampled = merge(chunks, *_score(logits, metadata, ids, chunks, thresholds), ids)
    _write_probs(logits, metadata, ids, chunks, thresholds, sampled, probs)
    return sampled


def token_probs(logits: Tensor, metadata: SamplingMetadata, *, filters: bool = True) -> TokenProbs:
    """As kernels/reference/sampling.py."""
    metadata = dense(metadata)
    chunks = find_peaks(logits, chunk_size(logits))
    thresholds = find_thresholds(logits, metadata, chunks, THRESHOLD_BLOCK) if filters else None
    greedy = merge(chunks, chunks.peaks, chunks.columns, None)
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    _write_probs(logits, metadata, None, chunks, thresholds, greedy, probs)
    return TokenProbs(probs, greedy.usable)


def chunk_size(logits: Tensor) -> int:
    rows, vocab_size = logits.shape
    few = rows * triton.cdiv(vocab_size, _FINE_CHUNK) <= _ENOUGH_PROGRAMS
    return _FINE_CHUNK if few else _COARSE_CHUNK


def dense(metadata: SamplingMetadata) -> SamplingMetadata:
    return SamplingMetadata(*(column.contiguous() for column in metadata))


def find_thresholds(
    logits: Tensor, metadata: SamplingMetadata, chunks: Chunks, block: int
) -> Thresholds:
    rows, vocab_size = logits.shape
    thresholds = Thresholds(
        logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int32)
    )
    thresholds_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        chunks.peaks,
        chunks.peaks.shape[1],
        *metadata[:4],
        *thresholds,
        CHUNKS=chunks.padded,
        BLOCK=block,
        num_warps=8,
    )
    return thresholds


def _score(
    logits: Tensor,
    metadata: SamplingMetadata,
    ids: Tensor | None,
    chunks: Chunks,
    thresholds: Thresholds | None,
) -> tuple[Tensor, Tensor]:
    """The best score of each chunk and its column, both [R, C]."""
    scores, columns = torch.empty_like(chunks.peaks), torch.empty_like(chunks.columns)
    scores_kernel[scores.shape](
        logits,
        logits.stride(0),
        logits.shape[1],
        chunks.peaks,
        chunks.columns,
        metadata.temperature,
        metadata.seeds,
        metadata.positions,
        *(thresholds or (None, None)),
        ids,
        scores,
        columns,
        CHUNK=chunks.size,
        CHUNKS=chunks.padded,
    )
    return scores, columns


def _write_probs(
    logits: Tensor,
    metadata: SamplingMetadata,
    ids: Tensor | None,
    chunks: Chunks,
    thresholds: Thresholds | None,
    sampled: SampledTokens,
    probs: Tensor,
) -> None:
    """`sampled`: the token of each row that is not drawn; of the others, any."""
    assert probs.stride(1) == 1
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _PROBS_CHUNK)
    masses = logits.new_empty(rows, num_chunks, dtype=torch.float32)
    row = logits, logits.stride(0), vocab_size, chunks.peaks, chunks.peaks.shape[1]
    row = *row, metadata.temperature, *(thresholds or (None, None))
    masses_kernel[masses.shape](*row, masses, CHUNK=_PROBS_CHUNK, PEAKS=chunks.padded)
    if ids is not None:
        probs.zero_()  # of the tokens that the draft vocabulary leaves out
    probs_kernel[masses.shape](
        *row,
        masses,
        sampled.token_ids,
        ids,
        probs,
        probs.stride(0),
        CHUNK=_PROBS_CHUNK,
        PEAKS=chunks.padded,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )


@triton.jit
def chunk_scores(
    logits,
    row_stride,
    vocab_size,
    peaks,
    temperature,
    seeds,
    positions,
    thresholds,
    last_columns,
    ids,
    row,
    chunk,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """What the token of a row that is drawn has the largest of: the scores of one chunk, -inf where
    a token is filtered out or is NaN; and their columns."""
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = cols < vocab_size
    x = tl.load(logits + row * row_stride + cols, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(x.to(tl.float32), temperature)
    raw_peak, _ = row_peak(peaks, row, num_chunks, CHUNKS)
    tokens = cols
    if ids is not None:
        tokens = tl.load(ids + cols, mask=inside, other=0).to(tl.int32)
    key = vocab_key(tl.load(seeds + row), tl.load(positions + row))
    score = below_peak(scaled, tl.div_rn(raw_peak, temperature)) + gumbel(key, tokens)
    if thresholds is not None:
        threshold = tl.load(thresholds + row)
        first_equal = cols <= tl.load(last_columns + row)
        kept = (scaled > threshold) | ((scaled == threshold) & first_equal)
        score = tl.where(kept, score, float("-inf"))
    return tl.where(inside & (score == score), score, float("-inf")), cols


@triton.jit
def scores_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    peak_columns,
    temperatures,
    seeds,
    positions,
    thresholds,
    last_columns,
    ids,
    scores,
    columns,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (R, C). The best score of each chunk and its column; a greedy row's score is its logit.

    peaks, peak_columns, scores, columns  # [R, C]
    thresholds, last_columns              # [R] or None: no filters
    ids                                   # [V] or None
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    at = row * num_chunks + chunk
    temperature = tl.load(temperatures + row)
    top = tl.load(peaks + at)
    column = tl.load(peak_columns + at)
    if temperature > 0:
        score, cols = chunk_scores(
            logits, row_stride, vocab_size, peaks, temperature, seeds, positions, thresholds,
            last_columns, ids, row, chunk, num_chunks, CHUNK, CHUNKS,
        )  # fmt: skip
        top, column = best(score, cols)
    tl.store(scores + at, top)
    tl.store(columns + at, column)


@triton.jit
def _weights(logits, cols, vocab_size, temperature, raw_peak, row, thresholds, last_columns):
    """Probabilities relative to the most likely token's; 0 for those that a filter drops."""
    x = tl.load(logits + cols, mask=cols < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = tl.div_rn(x, temperature)
    weights = tl.exp(below_peak(scaled, tl.div_rn(raw_peak, temperature)))
    if thresholds is not None:
        threshold = tl.load(thresholds + row)
        first_equal = cols <= tl.load(last_columns + row)
        kept = (scaled > threshold) | ((scaled == threshold) & first_equal)
        weights = tl.where(kept, weights, 0.0)
    return weights


@triton.jit
def masses_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    num_peaks,
    temperatures,
    thresholds,
    last_columns,
    masses,
    CHUNK: tl.constexpr,
    PEAKS: tl.constexpr,
):
    """Grid (R, C). masses  # [R, C] float32, sums of weights; 0 of rows that are not drawn

    peaks                     # [R, P]
    thresholds, last_columns  # [R] or None: no filters
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    raw_peak, usable = row_peak(peaks, row, num_peaks, PEAKS)
    mass = tl.full((), 0.0, tl.float32)
    if (temperature > 0) & usable:
        cols = chunk * CHUNK + tl.arange(0, CHUNK)
        row_logits = logits + row * row_stride
        weights = _weights(
            row_logits, cols, vocab_size, temperature, raw_peak, row, thresholds, last_columns
        )
        mass = tl.sum(weights, 0)
    tl.store(masses + row * tl.num_programs(1) + chunk, mass)


@triton.jit
def probs_kernel(
    logits,
    row_stride,
    vocab_size,
    peaks,
    num_peaks,
    temperatures,
    thresholds,
    last_columns,
    masses,
    token_ids,
    ids,
    probs,
    probs_stride,
    CHUNK: tl.constexpr,
    PEAKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Grid (R, C). Writes a chunk of a row's probabilities to its tokens' places.

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
    temperature = tl.load(temperatures + row)
    raw_peak, usable = row_peak(peaks, row, num_peaks, PEAKS)
    only = tl.load(token_ids + row)
    prob = (tokens == only).to(tl.float32)
    if (temperature > 0) & usable:
        chunks = tl.arange(0, CHUNKS)
        mass = tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
        row_logits = logits + row * row_stride
        weights = _weights(
            row_logits, cols, vocab_size, temperature, raw_peak, row, thresholds, last_columns
        )
        prob = tl.div_rn(weights, tl.sum(mass, 0))
    elif ids is not None:
        # Token 0 of a row that is not usable may have no column.
        tl.store(probs + row * probs_stride + only, tl.full((), 1.0, tl.float32))
    tl.store(probs + row * probs_stride + tokens, prob, mask=inside)

"""One token per row of logits, greedy or sampled, with static shapes and no look at the host.

Greedy alone: 2 kernels. Sampling adds one, filters another, laws two. A row's token depends on
nothing but its own logits and rules. Against kernels/reference/choose.py, gumbels and laws differ
by a few last bits, and borders of a nucleus as kernels/gpu/borders.py says.

Shapes: R rows, V columns of logits, C chunks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from peagle.kernels.gpu.argmax import merge_kernel, peaks_kernel
from peagle.kernels.gpu.borders import borders_kernel
from peagle.kernels.gpu.laws import laws_kernel, masses_kernel
from peagle.kernels.gpu.overlap import overlapping
from peagle.kernels.gpu.scores import scores_kernel
from peagle.kernels.reference.choose import Chosen, Laws, RowRules

# Few rows are cut finely, to occupy the whole device; no result depends on it.
_FINE_CHUNK, _COARSE_CHUNK, _ENOUGH_PROGRAMS = 1024, 2048, 2048
# Sums of mass do depend on these, so they are the same for any number of rows.
_BORDER_BLOCK, _LAW_CHUNK = 4096, 1024


class Chunks(NamedTuple):
    """The largest logit of each chunk and its column; how a row is cut."""

    peaks: Tensor  # [R, C] float32, NaN where the chunk has one
    columns: Tensor  # [R, C] int32
    size: int

    @property
    def padded(self) -> int:
        return int(triton.next_power_of_2(self.peaks.shape[1]))


class Borders(NamedTuple):
    """A token stays if its scaled logit is above the value, or equal and not behind the column."""

    values: Tensor  # [R] float32
    last_columns: Tensor  # [R] int32


def choose_tokens(
    logits: Tensor,
    rules: RowRules | None = None,
    ids: Tensor | None = None,
    *,
    filters: bool = True,
) -> Chosen:
    """As kernels/reference/choose.py. `filters` False leaves the search for borders out."""
    return choose_in_chunks(logits, rules, ids, filters, _chunk_size(logits), _BORDER_BLOCK)


def choose_in_chunks(
    logits: Tensor,
    rules: RowRules | None,
    ids: Tensor | None,
    filters: bool,
    chunk: int,
    block: int,
) -> Chosen:
    """`choose_tokens` with rows cut into chunks and blocks (powers of two) of these sizes."""
    chunks = _find_peaks(logits, chunk)
    values, columns = chunks.peaks, chunks.columns
    if rules is not None:
        rules = _dense(rules)
        borders = _find_borders(logits, rules, chunks, block) if filters else None
        values, columns = _score(logits, rules, ids, chunks, borders)
    return merge(chunks, values, columns, ids)


def choose_with_laws(
    logits: Tensor, rules: RowRules, ids: Tensor | None, laws: Tensor, *, filters: bool = True
) -> Chosen:
    """As kernels/reference/choose.py."""
    rules = _dense(rules)
    chunks = _find_peaks(logits, _chunk_size(logits))
    borders = _find_borders(logits, rules, chunks, _BORDER_BLOCK) if filters else None
    chosen = merge(chunks, *_score(logits, rules, ids, chunks, borders), ids)
    _write_laws(logits, rules, ids, chunks, borders, chosen, laws)
    return chosen


def token_laws(logits: Tensor, rules: RowRules, *, filters: bool = True) -> Laws:
    """As kernels/reference/choose.py."""
    rules = _dense(rules)
    chunks = _find_peaks(logits, _chunk_size(logits))
    borders = _find_borders(logits, rules, chunks, _BORDER_BLOCK) if filters else None
    best = merge(chunks, chunks.peaks, chunks.columns, None)
    laws = logits.new_empty(logits.shape, dtype=torch.float32)
    _write_laws(logits, rules, None, chunks, borders, best, laws)
    return Laws(laws, best.usable)


def _chunk_size(logits: Tensor) -> int:
    rows, vocab_size = logits.shape
    few = rows * triton.cdiv(vocab_size, _FINE_CHUNK) <= _ENOUGH_PROGRAMS
    return _FINE_CHUNK if few else _COARSE_CHUNK


def _dense(rules: RowRules) -> RowRules:
    return RowRules(*(rule.contiguous() for rule in rules))


def _find_peaks(logits: Tensor, chunk: int) -> Chunks:
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


def _find_borders(logits: Tensor, rules: RowRules, chunks: Chunks, block: int) -> Borders:
    rows, vocab_size = logits.shape
    borders = Borders(
        logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int32)
    )
    borders_kernel[(rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        chunks.peaks,
        chunks.peaks.shape[1],
        *rules[:4],
        *borders,
        CHUNKS=chunks.padded,
        BLOCK=block,
        num_warps=8,
    )
    return borders


def _score(
    logits: Tensor, rules: RowRules, ids: Tensor | None, chunks: Chunks, borders: Borders | None
) -> tuple[Tensor, Tensor]:
    """The best score of each chunk and its column, both [R, C]."""
    scores, columns = torch.empty_like(chunks.peaks), torch.empty_like(chunks.columns)
    scores_kernel[scores.shape](
        logits,
        logits.stride(0),
        logits.shape[1],
        chunks.peaks,
        chunks.columns,
        rules.temperature,
        rules.seeds,
        rules.positions,
        *(borders or (None, None)),
        ids,
        scores,
        columns,
        CHUNK=chunks.size,
        CHUNKS=chunks.padded,
    )
    return scores, columns


def merge(chunks: Chunks, values: Tensor, columns: Tensor, ids: Tensor | None) -> Chosen:
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
    return Chosen(tokens, usable.view(torch.bool))


def _write_laws(
    logits: Tensor,
    rules: RowRules,
    ids: Tensor | None,
    chunks: Chunks,
    borders: Borders | None,
    chosen: Chosen,
    laws: Tensor,
) -> None:
    """`chosen`: the token of each row that is not drawn; of the others, any."""
    assert laws.stride(1) == 1
    rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _LAW_CHUNK)
    masses = logits.new_empty(rows, num_chunks, dtype=torch.float32)
    row = logits, logits.stride(0), vocab_size, chunks.peaks, chunks.peaks.shape[1]
    row = *row, rules.temperature, *(borders or (None, None))
    masses_kernel[masses.shape](*row, masses, CHUNK=_LAW_CHUNK, PEAKS=chunks.padded)
    if ids is not None:
        laws.zero_()  # of the tokens that the draft vocabulary leaves out
    laws_kernel[masses.shape](
        *row,
        masses,
        chosen.token_ids,
        ids,
        laws,
        laws.stride(0),
        CHUNK=_LAW_CHUNK,
        PEAKS=chunks.padded,
        CHUNKS=triton.next_power_of_2(num_chunks),
    )

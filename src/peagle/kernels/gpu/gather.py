"""Rows brought to where a step reads them, a launch each; see kernels/reference/gather.py.

A program copies a tile of one row. Shapes: B slots of the step, R rows of each, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait

MAX_TILE = 1024  # elements of a row that one program copies


def _tile(size: int) -> int:
    return min(int(triton.next_power_of_2(size)), MAX_TILE)


def _grid(num_rows: int, size: int) -> tuple[int, int]:
    return num_rows, triton.cdiv(size, _tile(size))


@triton.jit
def _copy(source, out, size, TILE: tl.constexpr):
    """This program's tile of a row."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    tl.store(out + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def _expand(
    real, num_real, mask, out, given, rows, size,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, r = row // rows, row % rows
    is_real = r < tl.minimum(tl.load(num_real + b), given)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < size
    own_size = tl.where(is_real, size, 0)  # nothing is read of a row that does not exist
    own = tl.load(real + (b * given + r) * size + column, mask=column < own_size, other=0.0)
    learned = tl.load(mask + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, tl.where(is_real, own, learned), mask=inside)


def expand_rows(real: Tensor, num_real: Tensor, mask: Tensor, num_rows: int) -> Tensor:
    batch, given, size = real.shape
    out = torch.empty(batch * num_rows, size, dtype=real.dtype, device=real.device)
    _expand[_grid(batch * num_rows, size)](
        real.contiguous(), num_real, mask, out, given, num_rows, size,
        TILE=_tile(size), **overlapping(),
    )  # fmt: skip
    return out


@triton.jit
def _embed(
    table, token_ids, num_real, mask, out, given, rows, size,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, r = row // rows, row % rows
    is_real = r < tl.minimum(tl.load(num_real + b), given)
    token = tl.load(token_ids + tl.where(is_real, b * given + r, 0))
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < size
    own = tl.load(table + token * size + column, mask=inside, other=0.0)
    learned = tl.load(mask + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, tl.where(is_real, own, learned), mask=inside)


def embed_rows(
    table: Tensor, token_ids: Tensor, num_real: Tensor, mask: Tensor, num_rows: int
) -> Tensor:
    (batch, given), size = token_ids.shape, table.shape[1]
    assert table.is_contiguous()
    assert token_ids.is_contiguous()
    out = torch.empty(batch * num_rows, size, dtype=table.dtype, device=table.device)
    _embed[_grid(batch * num_rows, size)](
        table, token_ids, num_real, mask, out, given, num_rows, size,
        TILE=_tile(size), **overlapping(),
    )  # fmt: skip
    return out


@triton.jit
def _embed_tokens(
    table, first, others, places, out, rows, size, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    place = row
    if places is not None:
        place = tl.load(places + row)
    b, r = place // rows, place % rows
    token = tl.load(tl.where(r == 0, first + b, others + b * (rows - 1) + r - 1))
    _copy(table + token * size, out + row * size, size, TILE)


def embed_tokens(
    table: Tensor, first: Tensor, others: Tensor, places: Tensor | None = None
) -> Tensor:
    rows, size = others.shape[1] + 1, table.shape[1]
    assert table.is_contiguous()
    assert first.dtype == others.dtype == torch.int64
    total = first.shape[0] * rows if places is None else len(places)
    out = torch.empty(total, size, dtype=table.dtype, device=table.device)
    _embed_tokens[_grid(total, size)](
        table, first.contiguous(), others.contiguous(), places, out, rows, size,
        TILE=_tile(size), **overlapping(),
    )  # fmt: skip
    return out


@triton.jit
def _pick(
    hidden, num_real, out, rows, count, size,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        wait()
    place = tl.program_id(0).to(tl.int64)
    b = place // count
    row = tl.maximum(tl.load(num_real + b) - 1, 0) + place % count
    row = b * rows + tl.minimum(row, rows - 1)
    _copy(hidden + row * size, out + place * size, size, TILE)


def pick_rows(hidden: Tensor, num_real: Tensor, rows_per_slot: int, count: int) -> Tensor:
    size, total = hidden.shape[1], num_real.shape[0] * count
    out = torch.empty(total, size, dtype=hidden.dtype, device=hidden.device)
    _pick[_grid(total, size)](
        hidden.contiguous(), num_real, out, rows_per_slot, count, size,
        TILE=_tile(size), **overlapping(),
    )  # fmt: skip
    return out

"""What stands between the products of a correction; models/correction.py is the reference.

Shapes: R rows, M candidates of a depth, S = R / M states, W the correction's width, H hidden, B
slots, K depths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import overlapping, wait
from peagle.kernels.reference.trees import Candidates

_COLUMNS = 512  # of a row that one program gates
_DOT_COLUMNS = 64  # that candidates are multiplied by at once


def normed_rows(table: Tensor, token_ids: Tensor, eps: float) -> Tensor:
    """Rows of the table [V, H] for tokens [R], each with a root mean square of 1.  # [R, H]"""
    size = table.shape[1]
    assert table.stride(1) == 1
    out = torch.empty(len(token_ids), size, dtype=table.dtype, device=table.device)
    _normed_rows[(len(token_ids),)](
        table,
        table.stride(0),
        token_ids,
        out,
        eps,
        size,
        BLOCK=triton.next_power_of_2(size),
        **overlapping(),
    )
    return out


@triton.jit
def _normed_rows(
    table, stride, token_ids, out, eps, size, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr
):
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(table + tl.load(token_ids + row) * stride + column, mask=inside, other=0.0)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out + row * size + column, (x * scale).to(out.dtype.element_ty), mask=inside)


def gate_rows(of_states: Tensor, of_tokens: Tensor) -> Tensor:
    """silu(gate) * up of the sums: [S, 2W], and [R, 2W] with M rows for each of these -> [R, W]."""
    rows, size = len(of_tokens), of_tokens.shape[1] // 2
    assert of_states.is_contiguous()
    assert of_tokens.is_contiguous()
    out = torch.empty(rows, size, dtype=of_tokens.dtype, device=of_tokens.device)
    _gate_rows[(rows, triton.cdiv(size, _COLUMNS))](
        of_states,
        of_tokens,
        out,
        rows // len(of_states),
        size,
        COLUMNS=_COLUMNS,
        **overlapping(),
    )
    return out


@triton.jit
def _gate_rows(
    of_states, of_tokens, out, per_state, size, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
):
    if OVERLAPS:
        wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    state, token = of_states + row // per_state * 2 * size, of_tokens + row * 2 * size
    dtype = of_tokens.dtype.element_ty
    gate = tl.load(state + column, mask=inside) + tl.load(token + column, mask=inside)
    up = tl.load(state + size + column, mask=inside) + tl.load(token + size + column, mask=inside)
    gate = gate.to(dtype).to(tl.float32)
    opened = (gate * tl.sigmoid(gate)).to(dtype) * up.to(dtype)
    tl.store(out + row * size + column, opened, mask=inside)


def lattice_log_probs(
    changes: Tensor,  # [B * (K-1) * M, H] what is added to the states behind each candidate
    table: Tensor,  # [V, H]
    rows: Tensor,  # [B, K, M] of the table: the candidates'
    candidates: Candidates,  # [B, K, M]
    temperature: Tensor | None,  # [B], 0 where greedy; None: all are
) -> Tensor:
    """-> [B, K, M, M] float32: behind which candidate, of which candidate."""
    batch, depths, count = rows.shape
    assert changes.is_contiguous()
    assert table.stride(1) == 1
    out = torch.empty(batch, depths, count, count, dtype=torch.float32, device=rows.device)
    _lattice_log_probs[(batch, depths)](
        changes,
        table,
        table.stride(0),
        rows.contiguous(),
        candidates.log_probs.contiguous(),
        temperature,
        out,
        depths,
        table.shape[1],
        COUNT=count,
        COLUMNS=_DOT_COLUMNS,
        num_warps=4,
        **overlapping(),
    )
    return out


@triton.jit
def _lattice_log_probs(
    changes, table, stride, rows, log_probs, temperatures, out, depths, size,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Grid (B, K)."""
    if OVERLAPS:
        wait()
    b, depth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    candidate = tl.arange(0, COUNT)
    at = (b * depths + depth) * COUNT
    own = tl.load(log_probs + at + candidate)
    place = at * COUNT + candidate[:, None] * COUNT + candidate[None, :]
    shift = tl.zeros((COUNT, COUNT), dtype=tl.float32)
    if depth > 0:
        before = (b * (depths - 1) + depth - 1) * COUNT + candidate
        row = tl.load(rows + at + candidate)
        for first in range(0, size, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (column < size)[None, :]
            change = tl.load(
                changes + before[:, None] * size + column[None, :], mask=inside, other=0.0
            )
            weight = tl.load(
                table + row[:, None] * stride + column[None, :], mask=inside, other=0.0
            )
            product = change.to(tl.float32)[:, None, :] * weight.to(tl.float32)[None, :, :]
            shift += tl.sum(product, 2)
        if temperatures is not None:
            temperature = tl.load(temperatures + b)
            shift = shift / tl.where(temperature > 0, temperature, 1.0)
        highest = tl.max(own, 0)
        base = tl.where(highest > float("-inf"), highest, 0.0)
        held = base + tl.log(tl.sum(tl.exp(own - base), 0))
        score = own[None, :] + shift
        top = tl.max(score, 1)
        top = tl.where(top > float("-inf"), top, 0.0)
        total = top + tl.log(tl.sum(tl.exp(score - top[:, None]), 1))
        tl.store(out + place, score - total[:, None] + held)
    else:
        tl.store(out + place, tl.broadcast_to(own[None, :], (COUNT, COUNT)))

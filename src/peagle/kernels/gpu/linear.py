"""Products of few rows with a layer's weights, with the operations around them in one kernel.

Decoding a small model on a GPU is bound by the number of kernels, not by their work: so the norm
before a product, and the bias, gate and residual behind it, are part of it. The norm's scale, one
number per row, is applied to the sums: so its squares are summed in the same loop as the product,
which otherwise would have to wait for them. A tensor core's products that add to the same sum wait
for each other: so a tile may be summed in two or four parts. For many rows, and for large weights,
cuBLAS has the better product; norms.py holds what then stands between two of them.

Shapes: M rows, K inputs, N outputs. A row's sums have one order, decided by `tile`, which is the
same for every M <= 16: a row has the same bits alone or beside others.

`batch_invariant_tile` keeps it so for any number of rows: a sum has no parts, and the norm's place
follows from the weight. Which rows and outputs share a program, how many inputs a turn has and how
many turns are in flight leave each sum as it is. Triton chooses the tensor core's instruction on
Hopper by the rows of a tile: mma.sync below 64, wgmma from there on, with 4 warps or 8. Either adds
16 products at a time, in order of k, and both round alike, as a test on a GPU holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.norms import norm_scale, weigh_rows
from peagle.kernels.gpu.overlap import fetch_rows, overlapping, wait
from peagle.kernels.policy import FAST, MAX_SMALL_WEIGHT, Policy
from peagle.kernels.reference.linear import Norm


class LinearTile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int  # gated: so many gates and as many ups
    inputs: int  # of one turn of the loop
    warps: int
    stages: int
    sums: int = 1  # side by side, each takes every `sums`-th turn: 1, 2 or 4


def tile(rows: int, outputs: int, inputs: int, gated: bool, itemsize: int) -> LinearTile:
    """For a product [rows, inputs] x [outputs, inputs]; `outputs` counts gates and ups alike.

    Of some 40 forms on an H200 the best for SmolLM2's products inside its layers, or near it. Few
    rows: narrow tiles, so that there is a program for every multiprocessor, and many turns in
    flight. Many: wide ones, for then the same rows and weights are read by fewer programs.
    """
    if itemsize > 2:  # no tensor cores: the operands must fit the registers
        return LinearTile(min(_bound(rows), 64), 16, 32, warps=4, stages=2)
    return _TILES[_bound(rows), _kind(outputs, inputs, gated)]


def _bound(rows: int) -> int:
    """The row count, one of those with a tile of their own, up to which the tile is the best."""
    return next((bound for bound in _BOUNDS if rows <= bound), _BOUNDS[-1])


def _kind(outputs: int, inputs: int, gated: bool) -> str:
    narrow, long = outputs <= 640, inputs >= 1024
    return "gated" if gated else "wide" if not narrow else "long" if long else "short"


_TILES = {
    (16, "gated"): LinearTile(16, 16, 32, warps=2, stages=4, sums=4),
    (16, "wide"): LinearTile(16, 16, 32, warps=2, stages=4, sums=2),
    (16, "long"): LinearTile(16, 16, 128, warps=4, stages=4),
    (16, "short"): LinearTile(16, 16, 64, warps=2, stages=8),
    (32, "gated"): LinearTile(32, 16, 64, warps=2, stages=4, sums=2),
    (32, "wide"): LinearTile(32, 16, 64, warps=4, stages=8),
    (32, "long"): LinearTile(32, 16, 128, warps=2, stages=4, sums=2),
    (32, "short"): LinearTile(32, 16, 64, warps=2, stages=4),
    (64, "gated"): LinearTile(64, 16, 128, warps=4, stages=6),
    (64, "wide"): LinearTile(64, 16, 64, warps=4, stages=8),
    (64, "long"): LinearTile(64, 16, 64, warps=4, stages=4, sums=2),
    (64, "short"): LinearTile(64, 16, 128, warps=4, stages=4),
    (128, "gated"): LinearTile(64, 32, 64, warps=4, stages=4),
    (128, "wide"): LinearTile(64, 16, 64, warps=4, stages=4),
    (128, "long"): LinearTile(64, 16, 64, warps=4, stages=4, sums=2),
    (128, "short"): LinearTile(64, 16, 64, warps=4, stages=4),
    (192, "gated"): LinearTile(128, 32, 64, warps=8, stages=3),
    (192, "wide"): LinearTile(64, 32, 64, warps=4, stages=4),
    (192, "long"): LinearTile(64, 16, 64, warps=4, stages=4, sums=2),
    (192, "short"): LinearTile(64, 16, 64, warps=4, stages=4),
    (256, "gated"): LinearTile(128, 32, 64, warps=8, stages=3),
    (256, "wide"): LinearTile(64, 32, 64, warps=4, stages=4),
    (256, "long"): LinearTile(64, 32, 64, warps=4, stages=4, sums=2),
    (256, "short"): LinearTile(64, 32, 64, warps=4, stages=4),
    (384, "gated"): LinearTile(128, 64, 64, warps=8, stages=3),
    (384, "wide"): LinearTile(128, 32, 64, warps=8, stages=4),
    (384, "long"): LinearTile(64, 32, 64, warps=4, stages=4, sums=2),
    (384, "short"): LinearTile(64, 32, 64, warps=4, stages=4),
    (512, "gated"): LinearTile(128, 64, 64, warps=8, stages=3),
    (512, "wide"): LinearTile(128, 32, 64, warps=8, stages=4),
    (512, "long"): LinearTile(64, 32, 64, warps=4, stages=4, sums=2),
    (512, "short"): LinearTile(64, 64, 64, warps=8, stages=4),
}
_BOUNDS = sorted({rows for rows, _ in _TILES})


def batch_invariant_tile(
    rows: int, outputs: int, inputs: int, gated: bool, itemsize: int
) -> LinearTile:
    """As `tile`, with one order of sums for any number of rows: a single chain along the inputs.
    The tensor cores' two instructions, mma.sync below 64 rows and wgmma from there on, add up a
    chain alike (benchmarks/batch_invariance.py), so tiles may be chosen for speed."""
    if itemsize > 2:  # fused multiply-adds in order of k
        return LinearTile(16 if rows <= 16 else 32, 16, 32, warps=4, stages=2)
    if outputs * inputs > MAX_SMALL_WEIGHT:
        return _large_weight_tile(rows, outputs, gated)
    if rows <= 16:
        return _CHAINS[_kind(outputs, inputs, gated)]
    if rows <= 256:
        return tile(rows, outputs, inputs, gated, itemsize)._replace(sums=1)
    if rows <= 512:
        return LinearTile(64, 64, 128, warps=4, stages=3)
    return LinearTile(128, 64, 128, warps=8, stages=3)


_CHAINS = {
    "gated": LinearTile(16, 16, 128, warps=2, stages=4),
    "wide": LinearTile(16, 16, 128, warps=2, stages=4),
    "long": LinearTile(16, 16, 128, warps=4, stages=4),
    "short": LinearTile(16, 16, 64, warps=2, stages=8),
}


def _large_weight_tile(rows: int, outputs: int, gated: bool) -> LinearTile:
    """A weight that is bound by its bytes. Few rows: narrow tiles, so that every multiprocessor
    reads, with many bytes in flight."""
    if rows <= 16:
        return LinearTile(16, 32, 128, warps=2, stages=6)
    if rows <= 64:
        narrow = gated or outputs <= 8192
        return LinearTile(64, 32 if narrow else 64, 128, warps=4, stages=4)
    if rows <= 128:
        return LinearTile(64, 64, 64, warps=4, stages=4)
    if gated or rows <= 512:
        return LinearTile(128, 64, 64, warps=8 if gated else 4, stages=4)
    return LinearTile(128, 128, 64, warps=8, stages=4)


def output_tile(rows: int) -> LinearTile:
    """For the output product, which takes the argmax of logits or writes them.

    Of 8 forms on an H200 the best, or within 3 % of it, for 64 rows and the target's table of
    SmolLM2, and for 128 to 1,024 rows and both tables."""
    if rows <= 16:
        return LinearTile(16, 128, 64, warps=4, stages=4)
    if rows <= 64:
        return LinearTile(64, 128, 64, warps=4, stages=4)
    return LinearTile(128, 256, 64, warps=8, stages=3)


def tile_for(policy: Policy, x: Tensor, weight: Tensor, gated: bool = False) -> LinearTile:
    find = batch_invariant_tile if policy.batch_invariant else tile
    outputs, inputs = weight.shape
    return find(x.shape[0], outputs, inputs, gated, weight.dtype.itemsize)


def fused_linear(
    x: Tensor,  # [M, K]
    weight: Tensor,  # [N, K]; gated: the first N / 2 rows are the gate, the rest up
    bias: Tensor | None,  # [N]
    *,
    norm: Norm | None,  # of x, before the product
    residual: Tensor | None,  # [M, N], or [M, N / 2] when gated: added before the one rounding
    gated: bool = False,
    out_dtype: torch.dtype | None = None,  # None: that of x
    policy: Policy = FAST,
) -> Tensor:
    """-> [M, N], or silu(gate) * up [M, N / 2]."""
    block, scales = tile_for(policy, x, weight, gated), None
    if norm is not None and policy.batch_invariant and x.shape[0] > policy.max_normed_rows:
        # In as many places as the squares of few rows are added up in, inside their product.
        outputs, inputs = weight.shape
        few = batch_invariant_tile(1, outputs, inputs, gated, weight.dtype.itemsize)
        x, scales = weigh_rows(x, *norm, few.inputs)
        norm = None
    return _product(x, weight, bias, norm, scales, residual, gated, out_dtype or x.dtype, block)


def invariant_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [M, K] times weight [V, K] -> [M, V] in float32: the sums that `best_tokens` compares
    under the same policy."""
    assert hidden.dtype.itemsize == 2
    block = output_tile(hidden.shape[0])
    return _product(hidden, weight, None, None, None, None, False, torch.float32, block)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    scales: Tensor | None,  # [M]: of rows whose norm has begun
    residual: Tensor | None,
    gated: bool,
    out_dtype: torch.dtype,
    block: LinearTile,
) -> Tensor:
    rows, inputs = x.shape
    results = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, results, dtype=out_dtype, device=x.device)
    _check(x, weight, bias, norm, residual, out)
    if rows == 0:
        return out
    grid = (triton.cdiv(results, block.outputs), triton.cdiv(rows, block.rows))
    # A large weight comes from memory once: programs that run together read the same part of it.
    # Fetched ahead it would only push out of the cache what is in use.
    large = weight.numel() > MAX_SMALL_WEIGHT
    _fused_linear[grid[::-1] if large else grid](
        x,
        weight,
        # A pointer that is not read must still be one: x stands in.
        x if bias is None else bias,
        x if norm is None else norm.weight,
        x if scales is None else scales,
        x if residual is None else residual,
        out,
        rows,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        0.0 if norm is None else norm.eps,
        INPUTS=inputs,
        RESULTS=results,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_SCALES=scales is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        LARGE=large,
        BLOCK_ROWS=block.rows,
        BLOCK_OUTPUTS=block.outputs,
        BLOCK_INPUTS=block.inputs,
        SUMS=block.sums,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlapping(),
    )
    return out


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    """Our own mistakes: the kernel would read beyond the end, or something else."""
    inputs = x.shape[1]
    assert weight.shape[1] == inputs
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    assert norm is None or (norm.weight.shape == (inputs,) and norm.weight.is_contiguous())
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)


@triton.jit
def _add_products(
    x_rows, weight_rows, up_rows, norm_ptr, k, row_there, column_there, total, up_total, squares,
    INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums with the products of inputs k added; squares of x, for its norm."""
    k_there = k < INPUTS
    part = tl.load(x_rows + k[None, :], mask=row_there & k_there[None, :], other=0.0)
    if HAS_NORM:
        norm_weight = tl.load(norm_ptr + k, mask=k_there, other=0.0)
        wide = part.to(tl.float32)
        squares += wide * wide
        part = (wide * norm_weight.to(tl.float32)[None, :]).to(part.dtype)
    there = column_there[:, None] & k_there[None, :]
    weights = tl.load(weight_rows + k[None, :], mask=there, other=0.0)
    total = tl.dot(part, tl.trans(weights), total, input_precision="ieee")
    if GATED:
        ups = tl.load(up_rows + k[None, :], mask=there, other=0.0)
        up_total = tl.dot(part, tl.trans(ups), up_total, input_precision="ieee")
    return total, up_total, squares


@triton.jit
def sum_products(
    x_rows, weight_rows, up_rows, norm_ptr, row_there, column_there,
    INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """A tile of x times weights, and times ups; with a norm also the squares of x, whose scale is
    not applied: [BLOCK_ROWS, BLOCK_INPUTS], each of every BLOCK_INPUTS-th input.
    x_rows, weight_rows, up_rows: pointers  # [BLOCK_ROWS or BLOCK_OUTPUTS, 1]"""
    squares = tl.zeros((BLOCK_ROWS, BLOCK_INPUTS), dtype=tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    up_total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    total_2, up_2, total_3, up_3, total_4, up_4 = total, up_total, total, up_total, total, up_total
    for start in range(0, INPUTS, BLOCK_INPUTS * SUMS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        total, up_total, squares = _add_products(
            x_rows, weight_rows, up_rows, norm_ptr, k, row_there, column_there,
            total, up_total, squares, INPUTS, HAS_NORM, GATED,
        )  # fmt: skip
        if SUMS > 1:
            total_2, up_2, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + BLOCK_INPUTS, row_there, column_there,
                total_2, up_2, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
        if SUMS > 2:
            total_3, up_3, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + 2 * BLOCK_INPUTS, row_there,
                column_there, total_3, up_3, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
            total_4, up_4, squares = _add_products(
                x_rows, weight_rows, up_rows, norm_ptr, k + 3 * BLOCK_INPUTS, row_there,
                column_there, total_4, up_4, squares, INPUTS, HAS_NORM, GATED,
            )  # fmt: skip
    if SUMS > 1:
        total += total_2
        up_total += up_2
    if SUMS > 2:
        total += total_3 + total_4
        up_total += up_3 + up_4
    return total, up_total, squares


@triton.jit
def scale_and_add(total, scale, biases, there, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """A row's scale, [R, 1], may as well be applied to its sums [R, N]; then the bias [N] is added.
    In one rounding, stated explicitly: else the compiler would decide."""
    if HAS_BIAS:
        bias = tl.load(biases, mask=there, other=0.0).to(tl.float32)[None, :]
        total = tl.fma(total, scale, bias) if SCALED else total + bias
    elif SCALED:
        total = total * scale
    return total


# One compiled form for every number of rows, so that all have the same order of sums.
@triton.jit(do_not_specialize=["num_rows"])
def _fused_linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    scales_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    x_stride,
    weight_stride,
    residual_stride,
    eps,
    INPUTS: tl.constexpr,
    RESULTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # of rows whose norm has begun
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    LARGE: tl.constexpr,  # the weight
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_tile, column_tile = tl.program_id(1), tl.program_id(0)
    if LARGE:
        row_tile, column_tile = tl.program_id(0), tl.program_id(1)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = column_tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_there = (rows < num_rows)[:, None]
    column_there = columns < RESULTS
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[:, None] * weight_stride
    up_rows = weight_ptr + (columns + RESULTS).to(tl.int64)[:, None] * weight_stride

    if OVERLAPS:
        if not LARGE:
            real_columns = tl.minimum(columns, RESULTS - 1).to(tl.int64)[:, None]
            fetch_rows(weight_ptr + real_columns * weight_stride, INPUTS)
            if GATED:
                fetch_rows(weight_ptr + (real_columns + RESULTS) * weight_stride, INPUTS)
        wait()
    total, up_total, squares = sum_products(
        x_rows, weight_rows, up_rows, norm_ptr, row_there, column_there, INPUTS, HAS_NORM, GATED,
        BLOCK_ROWS, BLOCK_OUTPUTS, BLOCK_INPUTS, SUMS,
    )  # fmt: skip
    scale = squares  # in place of none
    if HAS_NORM:
        scale = norm_scale(squares, eps, INPUTS, BLOCK_INPUTS)[:, None]
    elif HAS_SCALES:
        scale = tl.load(scales_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    SCALED: tl.constexpr = HAS_NORM or HAS_SCALES
    total = scale_and_add(total, scale, bias_ptr + columns, column_there, SCALED, HAS_BIAS)
    if GATED:
        ups = bias_ptr + RESULTS + columns
        up_total = scale_and_add(up_total, scale, ups, column_there, SCALED, HAS_BIAS)
        total = total / (1.0 + tl.exp(-total)) * up_total
    there = row_there & column_there[None, :]
    if HAS_RESIDUAL:
        places = rows.to(tl.int64)[:, None] * residual_stride + columns[None, :]
        total += tl.load(residual_ptr + places, mask=there, other=0.0).to(tl.float32)
    places = rows.to(tl.int64)[:, None] * RESULTS + columns[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=there)

"""Experts with weights of few bits: each row times the weight of its expert, in one launch.

Weights are read as they are stored and become numbers of the rows' type inside the tile, which
4-bit and 8-bit numbers do exactly; so do MXFP4's scales, which are powers of two, outside float16's
far ends. The scales of FP8's blocks are applied in float32 to the sums of a block's inputs. Outputs
are the rows of the tensor cores' product, as in fp8.py: Hopper's take them from registers, so
expanded weights never go through shared memory.

How many rows an expert has is known to the device alone. The launch has as many programs as could
be needed, whatever the router says: each finds its expert and its rows from where the groups end,
and the ones left over have nothing to do.

A row's sum is one chain along the inputs, in turns of the same length in every form. `choose_form`
gives one form up to 16 rows per expert: there a row has the same bits alone or beside others.

The reference is kernels/reference/experts.py.
Shapes: R rows sorted by expert, E experts, O outputs, I inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.gpu.overlap import gdc_launch_dependents, gdc_wait, overlapping
from peagle.kernels.policy import HALF
from peagle.kernels.reference.experts import LowBitWeights

MXFP4_INPUTS = 128  # of one turn
FEW, SOME = 16, 64  # rows per expert


class Form(NamedTuple):
    """What one program computes, and how."""

    rows: int
    outputs: int
    warps: int
    stages: int


def choose_form(rows: int, experts: int, dtype: torch.dtype) -> Form:
    """By the rows that an expert has on average. Follows the rule of fp8.py; not measured."""
    if dtype not in HALF:  # no tensor cores: the operands must fit the registers
        return Form(16, 32, warps=4, stages=2)
    if rows <= FEW * experts:
        return Form(16, 64, warps=4, stages=4)
    return Form(64 if rows <= SOME * experts else 128, 64, warps=4, stages=3)


def num_programs(rows: int, experts: int, block: int) -> int:
    """Blocks of rows at the most: every expert's last one may have a single row."""
    return (rows + min(rows, experts) * (block - 1)) // block


def grouped_linear(x: Tensor, weights: LowBitWeights, bias: Tensor | None, ends: Tensor) -> Tensor:
    """As the reference's."""
    return grouped_product(x, weights, bias, ends, choose_form(len(x), len(ends), x.dtype))


def grouped_product(
    x: Tensor, weights: LowBitWeights, bias: Tensor | None, ends: Tensor, f: Form
) -> Tensor:
    values, scales, form = weights
    experts, outputs, _ = values.shape
    rows, inputs = x.shape
    is_fp4 = form.kind == "mxfp4"
    _check(x, weights, bias, ends)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows:
        _grouped_product[(num_programs(rows, experts, f.rows), triton.cdiv(outputs, f.outputs))](
            x,
            values,
            scales,
            scales if bias is None else bias,  # a pointer that is not read must still be one
            ends,
            out,
            outputs,
            inputs,
            experts,
            IS_FP4=is_fp4,
            HAS_BIAS=bias is not None,
            SCALE_OUTPUTS=form.outputs,
            SCALE_INPUTS=form.inputs,
            EXPERTS=triton.next_power_of_2(experts),
            BLOCK_ROWS=f.rows,
            BLOCK_OUTPUTS=f.outputs,
            BLOCK_INPUTS=MXFP4_INPUTS if is_fp4 else form.inputs,
            num_warps=f.warps,
            num_stages=f.stages,
            **overlapping(),
        )
    return out


def _check(x: Tensor, weights: LowBitWeights, bias: Tensor | None, ends: Tensor) -> None:
    """Our own mistakes: the kernel would read beyond the end, or something else."""
    values, scales, form = weights
    shape = len(ends), values.shape[1], x.shape[1]
    assert (values.shape, values.dtype) == form.values_of(shape)
    assert (scales.shape, scales.dtype) == form.scales_of(shape)
    assert form.inputs >= 16  # of a tensor core's turn
    assert bias is None or bias.shape == shape[:2]
    assert all(t is None or t.is_contiguous() for t in (x, values, scales, bias, ends))


@triton.jit
def _grouped_product(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    num_experts,
    IS_FP4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    SCALE_INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
    expert, first, end = _place(ends_ptr, num_experts, EXPERTS, BLOCK_ROWS)
    if expert >= num_experts:
        return
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row_there, column_there = rows < end, columns < num_outputs
    x_rows = x_ptr + rows[:, None] * num_inputs
    outputs = expert.to(tl.int64) * num_outputs + columns  # [outputs] among all experts'
    num_scales = tl.cdiv(num_inputs, SCALE_INPUTS)
    scale_rows = (
        expert.to(tl.int64) * tl.cdiv(num_outputs, SCALE_OUTPUTS) + columns // SCALE_OUTPUTS
    )
    scale_rows = scales_ptr + scale_rows * num_scales

    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for start in range(0, num_inputs, BLOCK_INPUTS):
        k = start + tl.arange(0, BLOCK_INPUTS)
        there = row_there[:, None] & (k < num_inputs)[None, :]
        x = tl.load(x_rows + k[None, :], mask=there, other=0.0)
        if IS_FP4:
            weight = _load_fp4(
                values_ptr + outputs[:, None] * (num_inputs // 2),
                scale_rows[:, None],
                start,
                column_there,
                num_inputs,
                BLOCK_INPUTS,
            )
            total = tl.dot(weight.to(x.dtype), tl.trans(x), total, input_precision="ieee")
        else:
            there = column_there[:, None] & (k < num_inputs)[None, :]
            places = values_ptr + outputs[:, None] * num_inputs + k[None, :]
            weight = tl.load(places, mask=there, other=0.0).to(x.dtype)
            scales = tl.load(scale_rows + start // SCALE_INPUTS, mask=column_there, other=0.0)
            total += tl.dot(weight, tl.trans(x), input_precision="ieee") * scales[:, None]
    if OVERLAPS:
        gdc_launch_dependents()
    total = tl.trans(total)

    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=column_there, other=0.0).to(tl.float32)
        total += bias[None, :]
    places = rows[:, None] * num_outputs + columns[None, :]
    there = row_there[:, None] & column_there[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _place(ends_ptr, num_experts, EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """-> this program's expert, num_experts or more if it has none; its first row, and where the
    expert's rows end."""
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    ends = tl.load(ends_ptr + expert, mask=there, other=0).to(tl.int32)
    begins = tl.load(ends_ptr + expert - 1, mask=there & (expert > 0), other=0).to(tl.int32)
    blocks = tl.where(there, (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    behind = tl.cumsum(blocks, axis=0)  # the programs up to each expert's last
    program = tl.program_id(0)
    own = tl.sum((behind <= program).to(tl.int32), axis=0)
    firsts = begins + (program - (behind - blocks)) * BLOCK_ROWS
    first = tl.sum(tl.where(expert == own, firsts, 0), axis=0)
    end = tl.sum(tl.where(expert == own, ends, 0), axis=0)
    return own, first, end


@triton.jit
def _load_fp4(values, scales, start, column_there, num_inputs, BLOCK_INPUTS: tl.constexpr):
    """-> weights [outputs, BLOCK_INPUTS] in float32; `values`, `scales`  # [outputs, 1] pointers

    The bits of a 4-bit number are those of a float16 2**14 times as small: sign, the low two bits
    of the exponent, the highest of the mantissa.
    """
    OUTPUTS: tl.constexpr = values.shape[0]
    BLOCKS: tl.constexpr = BLOCK_INPUTS // 32
    byte = start // 2 + tl.arange(0, BLOCK_INPUTS // 2)
    there = column_there[:, None] & (byte < num_inputs // 2)[None, :]
    pairs = tl.load(values + byte[None, :], mask=there, other=0).to(tl.int16)
    bits = tl.interleave(pairs & 15, pairs >> 4)  # [outputs, BLOCK_INPUTS]
    bits = ((bits & 7) << 9) | ((bits & 8) << 12)
    small = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    block = start // 32 + tl.arange(0, BLOCKS)
    there = column_there[:, None] & (block < num_inputs // 32)[None, :]
    exponents = tl.load(scales + block[None, :], mask=there, other=0).to(tl.int32)
    powers = (exponents << 23).to(tl.float32, bitcast=True) * 16384.0  # 2 ** 14
    scaled = tl.reshape(small, (OUTPUTS, BLOCKS, 32)) * powers[:, :, None]
    return tl.reshape(scaled, (OUTPUTS, BLOCK_INPUTS))

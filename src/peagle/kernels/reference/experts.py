"""Experts with weights of few bits: what these stand for, and each row times its own expert's.

MXFP4  4-bit numbers with a scale for each 32 inputs of an output: GPT-OSS's.
FP8    8-bit numbers with a scale for each block of outputs and inputs, 128 x 128 as a rule.

Shapes: E experts, O outputs, I inputs, R rows sorted by their expert.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.reference.fp8 import FP8

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ONE = 127  # MXFP4's scale s stands for 2 ** (s - 127)


class LowBitForm(NamedTuple):
    kind: Literal["mxfp4", "fp8"]
    # What shares a scale:
    outputs: int
    inputs: int

    def values_of(self, shape: tuple[int, int, int]) -> tuple[tuple[int, int, int], torch.dtype]:
        """Shape and type of the values of weights [E, O, I]."""
        experts, outputs, inputs = shape
        if self.kind == "mxfp4":
            return (experts, outputs, inputs // 2), torch.uint8
        return shape, FP8

    def scales_of(self, shape: tuple[int, int, int]) -> tuple[tuple[int, int, int], torch.dtype]:
        experts, outputs, inputs = shape
        blocks = experts, -(-outputs // self.outputs), -(-inputs // self.inputs)
        return blocks, torch.uint8 if self.kind == "mxfp4" else torch.float32


MXFP4 = LowBitForm("mxfp4", 1, 32)


class LowBitWeights(NamedTuple):
    """Of weights [E, O, I]."""

    values: Tensor  # [E, O, I] FP8; MXFP4: [E, O, I / 2], two a byte, the lower half first
    scales: Tensor  # [E, O / outputs, I / inputs] float32; MXFP4: uint8
    form: LowBitForm


def grouped_linear(x: Tensor, weights: LowBitWeights, bias: Tensor | None, ends: Tensor) -> Tensor:
    """x [R, I], each row times its expert's weight, plus its bias of [E, O]. `ends` [E]: where
    each expert's rows end. Summed in float32 or better; rounded once, behind the bias."""
    precise = torch.promote_types(x.dtype, torch.float32)
    out = x.new_empty(len(x), weights.values.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            own = None if bias is None else bias[expert].to(precise)
            matrix = expanded(weights, expert, precise)
            out[begin:end] = F.linear(x[begin:end].to(precise), matrix, own).to(x.dtype)
        begin = end
    return out


def expanded(weights: LowBitWeights, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's weight [O, I]."""
    values, scales = weights.values[expert], weights.scales[expert]
    if weights.form.kind == "mxfp4":
        return expand_mxfp4(values.view(1, len(values), -1, 16), scales[None], dtype)[0]
    return expand_fp8(values, scales, dtype, weights.form[1:])


def expand_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [E, O, G, 16], two values a byte, the lower half first; scales [E, O, G], as powers
    of two of the 32 values of a block -> [E, O, G * 32]."""
    device = blocks.device
    signed = [*FP4_VALUES, *(-x for x in FP4_VALUES)]
    values = torch.tensor(signed, dtype=torch.float32, device=device)
    experts, outputs, groups, half = blocks.shape
    out = torch.empty(experts, outputs, groups * half * 2, dtype=dtype, device=device)
    for expert in range(experts):  # one at a time: a whole layer in float32 is gigabytes
        packed = blocks[expert].int()
        pairs = torch.stack((values[packed & 15], values[packed >> 4]), dim=-1)
        exponents = scales[expert].int() - ONE
        out[expert] = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)
    return out


def expand_fp8(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None
) -> Tensor:
    """weight [O, I], scales of it all, of its outputs [O, 1] or of its blocks [O', I']. A `block`
    that nobody names is a power of two."""
    scales = scales.float()
    for dim in range(scales.dim()):
        size, count = weight.shape[dim], scales.shape[dim]
        if count > 1:  # the last one may be cut off
            found = 1 << (math.ceil(size / count) - 1).bit_length()
            scales = scales.repeat_interleave(block[dim] if block else found, dim)
            scales = scales.narrow(dim, 0, size)
    return (weight.float() * scales).to(dtype)

"""The product of few rows with a column-major weight, by linear.c: decoding's dearest operation.

Torch's product reads the weight as fast as memory allows for one row, but eight rows cost it
nearly two; here they cost little more than one, and that is what verification of drafts lives on.
A row's result is the same, bit for bit, whatever rows stand beside it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from peagle.kernels.cpu.library import Threads, cpu_library, run_on_threads

MAX_ROWS = 32  # beyond, MKL's packed product catches up


def linear_kernel_for(x: Tensor, weight: Tensor) -> LinearKernel | None:
    """The kernel where it may stand in for `F.linear(x, weight)`, else None."""
    fits = (
        x.is_cpu
        and weight.is_cpu
        and x.dtype is weight.dtype is torch.float32
        and x.dim() == 2
        and x.shape[0] <= MAX_ROWS
        and column_major(weight)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    return linear_kernel() if fits else None


def column_major(weight: Tensor) -> bool:
    return weight.stride() == (1, weight.shape[0])


@functools.cache
def linear_kernel() -> LinearKernel | None:
    """None where there is no library, or torch's threads cannot be used: one would be slower."""
    library = cpu_library() if run_on_threads() else None
    return None if library is None else LinearKernel(library)


class LinearKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        size, pointer = c_int64, c_void_p
        self._linear = library.linear
        self._linear.argtypes = (pointer, pointer, size, pointer, size, size, size, pointer)
        self._linear.restype = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, I], weight [O, I] column-major -> [N, O]."""
        rows, inputs = x.shape
        outputs = weight.shape[0]
        assert weight.shape == (outputs, inputs)
        assert column_major(weight)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((rows, outputs))
        team = Threads()  # named: it must outlive the call
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            rows,
            inputs,
            outputs,
            ctypes.addressof(team),
        )
        return out

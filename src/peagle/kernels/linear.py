"""The product of few rows with a column-major weight, by linear.c: decoding's dearest operation.

Torch's product reads the weight as fast as memory allows for one row, but eight rows cost it
nearly two; here they cost little more than one, and that is what verification of drafts lives on.
A row's result is the same, bit for bit, whatever rows stand beside it.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from peagle.kernels.compiling import load_library

SOURCE = Path(__file__).with_name("linear.c")
MAX_ROWS = 32  # beyond, MKL's packed product catches up


def linear_kernel_for(x: Tensor, weight: Tensor) -> LinearKernel | None:
    """The kernel where it may stand in for `F.linear(x, weight)`, else None."""
    fits = (
        x.is_cpu
        and x.dtype is weight.dtype is torch.float32
        and x.dim() == 2
        and x.shape[0] <= MAX_ROWS
        and weight.stride() == (1, weight.shape[0])
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )
    return linear_kernel() if fits else None


@functools.cache
def linear_kernel() -> LinearKernel | None:
    """None if PEAGLE_CPU_KERNELS=0, it cannot be compiled, or torch's threads cannot be used."""
    if os.environ.get("PEAGLE_CPU_KERNELS") == "0":
        return None
    run_on_threads = _run_on_threads()
    if run_on_threads is None:
        return None
    library = load_library(SOURCE)
    return None if library is None else LinearKernel(library, run_on_threads)


class LinearKernel:
    def __init__(self, library: ctypes.CDLL, run_on_threads: c_void_p) -> None:
        size, pointer = c_int64, c_void_p
        self._linear = library.linear
        self._linear.argtypes = (pointer, pointer, size, pointer, size, size, size, size, pointer)
        self._linear.restype = None
        self._run_on_threads = run_on_threads

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, I], weight [O, I] column-major -> [N, O]."""
        rows, inputs = x.shape
        outputs = weight.shape[0]
        assert weight.shape == (outputs, inputs)
        assert weight.stride() == (1, outputs)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((rows, outputs))
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            rows,
            inputs,
            outputs,
            torch.get_num_threads(),
            self._run_on_threads,
        )
        return out


def _run_on_threads() -> c_void_p | None:
    """GOMP_parallel as torch itself finds it: preloaded, or from the runtime it ships."""
    shipped = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    for path in (None, *map(str, shipped)):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, c_void_p)
        except (OSError, AttributeError):
            continue
    return None

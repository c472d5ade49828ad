"""The CPU kernels of ops.c, called on tensors.

Between two matrix products a decoding step runs a dozen torch operations on a few kilobytes,
each costing several microseconds; one C call replaces them. Shapes: N rows, H hidden, h heads,
g key-value heads, D head dimension, I intermediate.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.cpu.library import Threads, cpu_library

LANES = 8  # head dimensions are whole vectors
MAX_GROUP = 64  # heads that share a key-value head


def kernels_for(x: Tensor) -> CpuKernels | None:
    """The kernels where they may stand in for torch's operations on x, else None."""
    fits = x.is_cpu and x.dtype is torch.float32
    untracked = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return cpu_kernels() if fits and untracked else None


@functools.cache
def cpu_kernels() -> CpuKernels | None:
    """None where there is no library; decided once."""
    library = cpu_library()
    return None if library is None else CpuKernels(library)


class PagedSpan(NamedTuple):
    """Rows of one sequence, and the blocks that hold its cache."""

    start: int
    length: int
    blocks: Sequence[int]
    parents: Sequence[int] | None = None  # of all rows of a tree but the first
    first_row: int = 0  # of the tree, whose row 0 stands at `start`


class PagedStep(ctypes.Structure):
    """One step's rows over one paged cache; `step_layout` in kernels.h."""

    _fields_ = (
        ("num_spans", c_int64),
        ("spans", c_void_p),
        ("blocks", c_void_p),
        ("paths", c_void_p),
        ("path_size", c_int64),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
    )

    def __init__(
        self, spans: Sequence[PagedSpan], block_size: int, heads: int, kv_heads: int, dim: int
    ) -> None:
        assert heads % kv_heads == 0
        assert heads // kv_heads <= MAX_GROUP
        assert dim % LANES == 0
        blocks, numbers, paths = array("q"), array("q"), list[list[int]]()
        for span in spans:
            num_rows = span.first_row + span.length  # of a tree, with those that are there
            assert span.start + num_rows <= len(span.blocks) * block_size
            first_path = -1 if span.parents is None else len(paths)
            numbers.extend((span.start, span.length, len(blocks), first_path, span.first_row))
            blocks.extend(span.blocks)
            if span.parents is not None:
                assert len(span.parents) == num_rows - 1
                paths += _paths(span.parents)[span.first_row :]
        path_size = max(map(len, paths), default=0) + 1
        flat = array("q")
        for path in paths:
            flat.extend((len(path) - 1, *path, *[0] * (path_size - 1 - len(path))))
        super().__init__(
            len(spans),
            numbers.buffer_info()[0],
            blocks.buffer_info()[0],
            flat.buffer_info()[0],
            path_size,
            block_size,
            heads,
            kv_heads,
            dim,
        )
        self.num_rows = sum(span.length for span in spans)
        self._held = numbers, blocks, flat  # the structure only points into them


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The rows from the first one to each, with itself."""
    paths = [[0]]
    for row, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], row])
    return paths


class LayerCache(ctypes.Structure):
    """Where one layer's keys and values [S, g, D] lie; `layer_cache` in kernels.h."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("window", c_int64))

    def __init__(self, keys: int, values: int, window: int | None) -> None:
        assert window is None or window > 0
        super().__init__(keys, values, window or 0)


class CpuKernels:
    """Float32 tensors on the CPU, no gradients. What does not fit raises before C sees it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        size, pointer = c_int64, c_void_p
        self._rms_norm = library.rms_norm
        self._rms_norm.argtypes = (pointer, pointer, pointer, size, size, c_double)
        self._rms_norm.restype = None
        self._rotate = library.rotate
        self._rotate.argtypes = (pointer, pointer, size, pointer, pointer, size, size, size)
        self._rotate.restype = None
        self._silu_mul = library.silu_mul
        self._silu_mul.argtypes = (pointer, pointer, size, size)
        self._silu_mul.restype = None
        self._paged_attention = library.paged_attention
        rows = (pointer, size)
        self._paged_attention.argtypes = (pointer, *rows * 3, pointer, pointer, pointer)
        self._paged_attention.restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., H], weight [H]."""
        size = x.shape[-1]
        assert weight.shape == (size,)
        assert weight.is_cpu
        x = x.contiguous()
        out = torch.empty_like(x)
        self._rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // size, size, eps
        )
        return out

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """x [N, heads, D] whose rows may lie apart, cos and signed sin [N, 1, D]."""
        n, heads, dim = x.shape
        assert cos.shape == signed_sin.shape == (n, 1, dim)
        assert dim % 2 == 0
        x, stride = _rows(x)
        cos, signed_sin = cos.contiguous(), signed_sin.contiguous()
        out = x.new_empty((n, heads, dim))
        self._rotate(
            out.data_ptr(),
            x.data_ptr(),
            stride,
            cos.data_ptr(),
            signed_sin.data_ptr(),
            n,
            heads,
            dim,
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2I] -> [..., I]."""
        *leading, double = gate_up.shape
        size = double // 2
        assert double == 2 * size
        gate_up = gate_up.contiguous()
        out = gate_up.new_empty((*leading, size))
        self._silu_mul(out.data_ptr(), gate_up.data_ptr(), out.numel() // size, size)
        return out

    def paged_attention(
        self,
        q: Tensor,  # [N, h, D]
        k: Tensor,  # [N, g, D]
        v: Tensor,  # [N, g, D]
        cache: LayerCache,
        step: PagedStep,
    ) -> Tensor:
        """Writes k and v to their slots, then each row attends to its sequence so far."""
        n, heads, dim = q.shape
        assert n == step.num_rows
        assert heads == step.heads
        assert dim == step.dim
        assert k.shape == v.shape == (n, step.kv_heads, dim)
        (q, q_stride), (k, k_stride), (v, v_stride) = _rows(q), _rows(k), _rows(v)
        out = q.new_empty((n, heads, dim))
        team = Threads()  # named: it must outlive the call
        self._paged_attention(
            out.data_ptr(),
            q.data_ptr(),
            q_stride,
            k.data_ptr(),
            k_stride,
            v.data_ptr(),
            v_stride,
            ctypes.addressof(cache),
            ctypes.addressof(step),
            ctypes.addressof(team),
        )
        return out


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [N, heads, D] with each row in one piece, and how far apart the rows lie."""
    row, head, element = x.stride()
    if head == x.shape[2] and element == 1:
        return x, row
    return x.contiguous(), x.shape[1] * x.shape[2]

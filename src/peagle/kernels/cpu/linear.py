"""The product with a packed weight, by linear.c: decoding's dearest operation.

Torch's product reads the weight as fast as memory allows for one row, but eight rows cost it
several times that; here they cost little more than one, and that is what verification of drafts
lives on. A row's result is the same, bit for bit, whatever rows stand beside it.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.cpu.library import Threads, cpu_library, run_on_threads


@dataclass(frozen=True)
class PackedWeight:
    """A weight [O, I], or one of each expert [E, O, I], in the order in which linear.c reads it.

    It stands where the weight stood. Whoever wants more than its product or some of its rows gets
    a copy in the usual order, in float32.
    """

    # [P, I, WIDTH] or [E, P, I, WIDTH]; 0 behind the last output. In bfloat16 where that holds all
    # numbers as they are, else in float32.
    panels: Tensor
    num_outputs: int

    @property
    def shape(self) -> torch.Size:
        *experts, _, inputs, _ = self.panels.shape
        return torch.Size((*experts, self.num_outputs, inputs))

    def expert(self, index: int) -> PackedWeight:
        return PackedWeight(self.panels[index], self.num_outputs)

    def product(self, x: Tensor) -> Tensor:
        """[N, I] float32 -> [N, O]"""
        return _kernel()(x, self)

    def rows(self, ids: Tensor) -> Tensor:
        """[...] -> [..., I]"""
        return _kernel().rows(self, ids)

    def unpacked(self) -> Tensor:
        """[..., O, I]"""
        together = self.panels.transpose(-2, -1).flatten(-3, -2)
        return together[..., : self.num_outputs, :].float().contiguous()

    @property
    def place(self) -> PackedPlace:
        return PackedPlace(self.panels.data_ptr(), self.panels.itemsize)


class PackedPlace(ctypes.Structure):
    """`packed_weight` in kernels.h."""

    _fields_ = (("panels", c_void_p), ("size", c_int64))


Weight = Tensor | PackedWeight


def packed(weight: Tensor) -> Weight:
    """The weight as the kernel reads it, where there is one for it."""
    fits = weight.is_cpu and weight.dtype is torch.float32 and weight.dim() in (2, 3)
    kernel = linear_kernel() if fits else None
    return weight if kernel is None else kernel.pack(weight)


def unpacked(weight: Weight) -> Tensor:
    return weight.unpacked() if isinstance(weight, PackedWeight) else weight


def rows_of(weight: Weight, ids: Tensor) -> Tensor:
    """Rows [...] of a weight [O, I] -> [..., I]"""
    return weight.rows(ids) if isinstance(weight, PackedWeight) else F.embedding(ids, weight)


@functools.cache
def linear_kernel() -> LinearKernel | None:
    """None where there is no library, or torch's threads cannot be used: one would be slower."""
    library = cpu_library() if run_on_threads() else None
    return None if library is None else LinearKernel(library)


def _kernel() -> LinearKernel:
    kernel = linear_kernel()
    assert kernel is not None, "without it nothing is packed"
    return kernel


class LinearKernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        size, pointer = c_int64, c_void_p
        self._linear = library.linear
        self._linear.argtypes = (pointer, pointer, size, PackedPlace, size, size, size, pointer)
        self._linear.restype = None
        self._pack = library.pack
        self._pack.argtypes = (pointer, size, pointer, size, size, pointer)
        self._pack.restype = None
        self._fits_half = library.fits_half
        self._fits_half.argtypes = (pointer, size)
        self._fits_half.restype = c_int64
        self._rows = library.packed_rows
        self._rows.argtypes = (pointer, PackedPlace, pointer, size, size, size)
        self._rows.restype = c_int64
        self.width: int = library.panel_width()

    def __call__(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """x [N, I] float32, weight [O, I] -> [N, O]."""
        rows, inputs = x.shape
        outputs = weight.num_outputs
        assert weight.shape == (outputs, inputs)
        assert x.is_cpu
        assert x.dtype is torch.float32
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty((rows, outputs))
        team = Threads()  # named: it must outlive the call
        self._linear(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.place,
            rows,
            inputs,
            outputs,
            ctypes.addressof(team),
        )
        return out

    def pack(self, weight: Tensor) -> PackedWeight:
        """[..., O, I] float32"""
        *experts, outputs, inputs = weight.shape
        weight = weight.contiguous()
        is_half = self._fits_half(weight.data_ptr(), weight.numel())
        shape = (*experts, -(-outputs // self.width), inputs, self.width)
        panels = weight.new_empty(shape, dtype=torch.bfloat16 if is_half else torch.float32)
        team = Threads()  # named: it must outlive the calls
        pairs = zip(panels, weight, strict=True) if experts else ((panels, weight),)
        for place, own in pairs:
            parts = place.data_ptr(), place.itemsize, own.data_ptr()
            self._pack(*parts, inputs, outputs, ctypes.addressof(team))
        return PackedWeight(panels, outputs)

    def rows(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        """Rows [...] of a weight [O, I] -> [..., I]"""
        flat = ids.flatten().long().contiguous()
        outputs, inputs = weight.shape
        out = weight.panels.new_empty((*ids.shape, inputs), dtype=torch.float32)
        if not self._rows(
            out.data_ptr(),
            weight.place,
            flat.data_ptr(),
            len(flat),
            inputs,
            outputs,
        ):
            raise IndexError(f"a row was asked for beyond the {outputs} of a weight")
        return out

"""A stack of decoder layers over a paged cache in one call, by layers.c."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.cpu.library import Threads, cpu_library, run_on_threads
from peagle.kernels.cpu.linear import PackedPlace, PackedWeight
from peagle.kernels.cpu.ops import PagedStep
from peagle.kernels.layer_tensors import LayerTensors, Projection


class CacheLayers:
    """Where each layer's keys and values [S, g, D] lie, and by which of the block tables."""

    def __init__(self, keys: Sequence[int], values: Sequence[int], tables: Sequence[int]) -> None:
        assert len(keys) == len(values) == len(tables)
        self.keys, self.values = (array("Q", addresses) for addresses in (keys, values))
        self.tables = array("q", tables)

    def addresses(self, layer: int) -> tuple[int, int]:
        return self.keys[layer], self.values[layer]


class CachePlace(NamedTuple):
    """The layers' caches, and this step's rows in them by each block table."""

    layers: CacheLayers
    steps: Sequence[PagedStep]


class _Projection(ctypes.Structure):
    """`projection` in layers.c."""

    _fields_ = (("weight", PackedPlace), ("bias", c_void_p))


class _Layer(ctypes.Structure):
    """`layer` in layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in LayerTensors._fields[:4]),
        *((name, _Projection) for name in LayerTensors._fields[4:8]),
        ("intermediate", c_int64),
        ("window", c_int64),
        ("eps", c_double),
    )


class _State(ctypes.Structure):
    """`step_state` in layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("cosine", "sine", "keys", "values", "tables")),
        *((name, c_int64) for name in ("rows", "hidden")),
        *((name, c_void_p) for name in ("layouts", "team")),
    )


def kernel_takes(x: Tensor) -> bool:
    """Whether the rows x [N, H] may go through the kernel."""
    fits = x.is_cpu and x.dtype is torch.float32 and x.dim() == 2
    return fits and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def fits_kernel(layer: LayerTensors) -> bool:
    """Whether all of the layer lies as the kernel reads it."""
    projections = (layer.qkv, layer.o, layer.gate_up, layer.down)
    vectors = (*layer[:4], *(p.bias for p in projections))
    there = [vector for vector in vectors if vector is not None]
    in_place = all(v.is_cpu and v.dtype is torch.float32 and v.is_contiguous() for v in there)
    return in_place and all(p.packed for p in projections)


@functools.cache
def layers_function() -> ctypes._NamedFuncPointer | None:
    """None where there is no library, or torch's threads cannot be used."""
    library = cpu_library() if run_on_threads() else None
    if library is None:
        return None
    function = library.decoder_layers
    pointer, size = c_void_p, c_int64
    function.argtypes = (pointer, pointer, pointer, size, pointer, size, pointer, pointer)
    function.restype = None
    return function


class LayersKernel:
    """Bound to where the layers' tensors lie now: make a new one when they move."""

    def __init__(self, function: ctypes._NamedFuncPointer, layers: Sequence[LayerTensors]) -> None:
        assert all(map(fits_kernel, layers))
        self._function = function
        self._layers = (_Layer * len(layers))(*(_pointers(layer) for layer in layers))
        self._held = layers
        self._inputs = _packed(layers[0].qkv).shape[1]
        self._hidden = _packed(layers[0].down).shape[0]
        self._inner = max(_packed(layer.down).shape[1] for layer in layers)

    def __call__(
        self,
        x: Tensor,  # [N, H]
        inputs: Tensor | None,  # [N, I]: what the first layer's attention reads; None: normed x
        rotation: tuple[Tensor, Tensor],  # [N, 1, D] each
        place: CachePlace,
        kept_layers: Sequence[int] = (),  # counted from 1; the last is kept anyway
    ) -> list[Tensor]:
        """-> the outputs [N, H] of all layers; those that are not kept share one place."""
        step, caches = place.steps[0], place.layers
        self._check(x, inputs, place)
        x, inputs = x.contiguous(), None if inputs is None else inputs.contiguous()
        cos, signed_sin = (part.contiguous() for part in rotation)
        rows, hidden = x.shape
        assert cos.shape == signed_sin.shape == (rows, 1, step.dim)
        team = Threads()
        layouts = array("Q", map(ctypes.addressof, place.steps))
        pointers = caches.keys, caches.values, caches.tables
        state = _State(
            cos.data_ptr(),
            signed_sin.data_ptr(),
            *(own.buffer_info()[0] for own in pointers),
            rows,
            hidden,
            layouts.buffer_info()[0],
            ctypes.addressof(team),
        )
        own = {layer - 1 for layer in kept_layers if layer} | {len(self._layers) - 1}
        places = iter(x.new_empty((len(own) + 1, rows, hidden)))
        common = next(places)  # for a long prompt, all layers' together would be gigabytes
        states = [next(places) if n in own else common for n in range(len(self._layers))]
        addresses = array("Q", (state.data_ptr() for state in states))
        heads = 3 * (step.heads + step.kv_heads) * step.dim
        scratch = x.new_empty(rows * (hidden + heads + 3 * self._inner))
        self._function(
            addresses.buffer_info()[0],
            x.data_ptr(),
            None if inputs is None else inputs.data_ptr(),
            self._inputs,
            ctypes.addressof(self._layers),
            len(self._layers),
            ctypes.addressof(state),
            scratch.data_ptr(),
        )
        return states

    def _check(self, x: Tensor, inputs: Tensor | None, place: CachePlace) -> None:
        """Our own mistakes: C would read beyond the end."""
        step = place.steps[0]
        rows = step.num_rows
        assert len(place.layers.tables) == len(self._layers)
        assert all(own.num_rows == rows for own in place.steps)
        assert x.shape == (rows, self._hidden)
        if inputs is None:
            assert self._held[0].input_norm is not None
            assert self._inputs == self._hidden
        else:
            assert inputs.shape == (rows, self._inputs)
        queries, kv = step.heads * step.dim, step.kv_heads * step.dim
        assert _packed(self._held[0].qkv).shape[0] == queries + 2 * kv
        assert _packed(self._held[0].o).shape == (self._hidden, queries)


def _pointers(layer: LayerTensors) -> _Layer:
    vectors = (_address(tensor) for tensor in layer[:4])
    projections = (layer.qkv, layer.o, layer.gate_up, layer.down)
    matrices = (_Projection(_packed(p).place, _address(p.bias)) for p in projections)
    inner = _packed(layer.down).shape[1]
    return _Layer(*vectors, *matrices, inner, layer.window or 0, layer.eps)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed(projection: Projection) -> PackedWeight:
    assert projection.packed is not None
    return projection.packed

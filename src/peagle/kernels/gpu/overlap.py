"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch).

A kernel launched so starts when all programs of the kernel before it have called
`gdc_launch_dependents`. What it does first, it does while that kernel still works; `gdc_wait`
returns when that kernel has ended and its writes can be seen. Rules, for every kernel here:

- It waits before it writes, and calls `gdc_launch_dependents` behind `gdc_wait` and not sooner:
  so at most one kernel waits in front of the one that works, and the one before that has ended.
- Before the wait it may read what was written two kernels ago or earlier, such as a step's row
  plan (`tests/kernels/gpu/test_overlap.py` has the list).
- Products and attention fetch weights and old keys to the L2 cache before the wait: these come from
  memory while the kernel before works. Without that an early start gains little, and the signal
  right behind the wait nothing. (The 8-bit kernels fetch nothing and signal behind their sums.)

cuBLAS's kernels, which do the products of many rows, let nobody start early: with some hundred rows
the others still gain, with a thousand not. docs/results.md has the times of a step's kernels.

Needs a GPU of Hopper's generation or later; Triton's interpreter knows nothing of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "fetch_rows",
    "gdc_launch_dependents",
    "gdc_wait",
    "overlapping",
    "wait",
]


def overlapping() -> dict[str, Any]:
    """What a launch says: that the kernel waits, and that it may start early. Never only one."""
    return {"OVERLAPS": True, "launch_pdl": True} if _is_supported() else {"OVERLAPS": False}


@triton.jit
def wait():
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch(pointers):
    """The cache lines at these addresses, which must exist, to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_rows(rows, LENGTH: tl.constexpr):
    """Rows of LENGTH elements each, from their first on; `rows`  # [R, 1] pointers"""
    PER_LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2((LENGTH + PER_LINE - 1) // PER_LINE)
    fetch(rows + tl.minimum(tl.arange(0, LINES) * PER_LINE, LENGTH - 1)[None, :])


@functools.cache
def _is_supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

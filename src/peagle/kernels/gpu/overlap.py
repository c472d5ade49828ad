"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch).

A kernel launched so may start when all programs of the kernel before it have said
`gdc_launch_dependents`; it must call `gdc_wait` before it reads or writes anything, which returns
when that kernel has ended and its writes can be seen. So a kernel's start hides behind the end of
the last one: a seventh of the time of SmolLM2's layers with few rows on an H200. Said too early it
does the opposite: kernels that wait pile up in front of the one that works (a step of 32 rows took
twice as long). With many rows, where cuBLAS does the products, it gains nothing: cuBLAS lets
nobody start early.

Needs a GPU of Hopper's generation or later; Triton's interpreter knows nothing of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.kernels.plain.linear import MAX_FUSED_ROWS

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "overlaps"]


def overlaps(num_rows: int) -> bool:
    return num_rows <= MAX_FUSED_ROWS and _is_supported()


def launch_options(num_rows: int) -> dict[str, Any]:
    return {"launch_pdl": True} if overlaps(num_rows) else {}


@functools.cache
def _is_supported() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

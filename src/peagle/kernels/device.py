"""Where Triton kernels may stand in for torch's operations. Imports no Triton itself."""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def gpu_takes(x: Tensor) -> bool:
    """On a GPU, in a precision that they know, and where no gradient is wanted."""
    untracked = not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return x.is_cuda and x.dtype in _DTYPES and untracked

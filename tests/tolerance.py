"""How far two computations of the same thing may lie apart, by rounding alone.

A CPU decides in which order torch adds, with how wide vectors and whether a product is rounded
before it is added. A sum of n terms is then off by about sqrt(n) * eps / 4 of a typical result,
whatever the order: most errors have either sign. Layers one after another add their errors up.

Bits are asked for where our own kernels promise them, and nowhere else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The worst of some thousand values, of two computations, through the handful of sums of a layer.
# A term left out of a sum of hundreds is a hundred times more.
ROOM = 16


def rounding(*, terms: int, depth: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """Relative to a typical value; `terms` of the longest sum, `depth` layers of such sums."""
    return ROOM * torch.finfo(dtype).eps * depth * math.sqrt(terms)


def near(size: Tensor | float = 1.0, *, terms: int, depth: int = 1) -> dict[str, float]:
    """What `torch.testing.assert_close` is to allow float32 values of this typical size.

    The size of a tensor is its root mean square: a value near zero is often the difference of
    large ones, and has their rounding.
    """
    if isinstance(size, Tensor):
        size = float(size.double().square().mean().sqrt())
    relative = rounding(terms=terms, depth=depth)
    return {"rtol": relative, "atol": relative * size}

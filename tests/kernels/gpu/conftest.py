"""Kernels run on the GPU where there is one, elsewhere in the interpreter (tests/conftest.py)."""

from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by NumPy's BLAS, whose order of sums may depend on a row's
    place in the tile, as no tensor core's does."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    by_blas = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if a.data.itemsize == 1:  # 8-bit floats, which only the builder knows how to read
            return by_blas(builder, a, b, total, *options)
        product = np.einsum("ik,kj->ij", a.data, b.data, dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)

"""Kernels run on the GPU where there is one, elsewhere in the interpreter (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

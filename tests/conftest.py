"""Deterministic property tests, and a visible skip where a marker's resource is missing."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

import peagle  # before torch: it says how long waiting threads spin

# A CI machine's speed must not decide whether a property holds; a failure must come back.
settings.register_profile(
    "peagle",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("peagle")

# A shell's background jobs are started with Ctrl-C ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"peagle {peagle.__version__}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("vllm") and not _has_vllm():
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


# Triton reads it once, when it is first imported, and torch may do that in any conftest or test.
if not _has_cuda():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Tiny tensors: threads would only wait for each other."""

from __future__ import annotations

from tests.train.conftest import _one_thread as _one_thread

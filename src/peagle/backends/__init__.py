"""Engines behind one contract, for the verbs that generate, measure and serve."""

from __future__ import annotations

from typing import Literal

BackendName = Literal["embedded", "vllm"]

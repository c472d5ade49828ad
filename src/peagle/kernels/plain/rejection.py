"""Rejection sampling in plain torch: the definition itself."""

from __future__ import annotations

from peagle.speculation.verify import PADDING, Verdict, verify_rejection

__all__ = ["PADDING", "Verdict", "verify_rejection"]

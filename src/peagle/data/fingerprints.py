"""Which tokenizer and which chat template made a dataset."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def template_fingerprint(tokenizer: Any) -> str | None:
    """None: the model has no chat template."""
    return _digest(tokenizer.chat_template) if tokenizer.chat_template else None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of its tokens and their ids: files may be written otherwise and mean the same."""
    return _digest(sorted(tokenizer.get_vocab().items()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

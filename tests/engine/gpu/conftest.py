"""Few shapes for all engines of this folder; captured.py says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peagle.engine.lanes import prompts, shapes

from .captured import BATCH


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "BATCH_SIZES", (BATCH,))
        patch.setattr(prompts, "padded", lambda num_items: 1)
        yield

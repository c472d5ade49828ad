"""Few shapes for all engines of this folder; captured.py says why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peagle.engine import runner

from .captured import BATCH, ITEMS


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "BATCH_SIZES", (BATCH,))
        patch.setattr(runner, "ITEM_COUNTS", (0, ITEMS))
        yield

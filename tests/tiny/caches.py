"""Paged caches that hold NaN until they are written, and block tables that are not in order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.models.drafter import CacheLayout


def poisoned_cache(
    layout: CacheLayout, num_slots: int, dtype: torch.dtype = torch.float64
) -> PagedKVCache:
    """NaN everywhere: an entry that is read before it was written spoils the result."""
    cache = PagedKVCache(layout, num_slots, dtype, torch.device("cpu"))
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


def shuffled_tables(
    lengths: Sequence[int], block_size: int = 4, seed: int = 0
) -> tuple[list[BlockTable], int]:
    """Tables of blocks that lie anywhere, and the number of slots they need in all.

    The first sequence's blocks follow each other, so that both ways of reading are taken.
    """
    counts = [-(-length // block_size) for length in lengths]
    first, others = counts[0], list(range(counts[0], sum(counts)))
    random.Random(seed).shuffle(others)
    tables = []
    for number, count in enumerate(counts):
        blocks = list(range(first)) if number == 0 else [others.pop() for _ in range(count)]
        table = BlockTable(block_size, range(0))
        for block in blocks:
            table.append(block)
        tables.append(table)
    return tables, sum(counts) * block_size

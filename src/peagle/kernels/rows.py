"""Rows over a paged cache as device tensors alone: what a step captured in a CUDA graph reads.

Shapes: I items, Q rows each, N rows in all, T block tables, S slots, g key-value heads, D head
dimension. An item's rows stand at consecutive positions of one sequence. A sequence with more new
rows than Q is several items; rows that only fill an item up are written to the padding slot.

Row j of item i sees the keys at positions <= starts[i] + j that are below ends[i]. Rows of a tree
lie in the cache as they come, and see of their own tree the rows that `ancestors` says. Rows before
an item's first may have been written earlier: then `starts` is where the tree begins.

Where items share rows (`row_starts`), each has its own number of them, Q at most, and N is what all
have together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PagedRows(NamedTuple):
    block_tables: Tensor  # [T, M] int32: the blocks of each sequence in order of position
    tables: Tensor  # [I] int32: the item's row of block_tables
    starts: Tensor  # [I] int32: position of the item's first row
    ends: Tensor  # [I] int32: only keys at positions below it were written and may be read
    positions: Tensor  # [N] int64: of each row; below the rotary table's length
    slots: Tensor  # [N] int64: where the row's key and value go; S - 1 is the padding slot
    rows_per_item: int  # Q
    block_size: int
    num_splits: int  # parts over which an item's keys are divided; their results are merged
    ancestors: Tensor | None = None  # [I * Q] int64: bit j: the row sees row j of its tree
    first_row: int = 0  # of its tree that an item's first is
    row_starts: Tensor | None = None  # [I + 1] int32: where each item's rows begin; None: i * Q


class RowGroups(NamedTuple):
    """The rows of one pass: groups of items of one size each, one behind the other. All rows are
    written before any is read, so a sequence may have items in several groups."""

    positions: Tensor  # [N] of all rows
    slots: Tensor  # [N]
    groups: Sequence[PagedRows]  # parts of them

    def parts(self, x: Tensor) -> list[Tensor]:
        """x [N, ...] by groups."""
        return list(torch.split(x, [len(group.slots) for group in self.groups]))

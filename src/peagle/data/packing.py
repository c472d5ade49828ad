"""Several documents in one row of n tokens, with no leak between them.

Positions restart with each document, because a served request starts at position 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.dataset import Dataset

NUM_OPEN = 32  # rows that still take documents: more fill better, fewer keep the order random


class PackedRow(NamedTuple):
    """n tokens. Each padding token is a document of its own: it sees itself and nobody sees it."""

    token_ids: Tensor  # [n] int64
    document: Tensor  # [n] int32: 0, 1, ... in order, never falling
    position: Tensor  # [n] int32: 0 at the start of each document
    loss_mask: Tensor  # [n] bool
    indices: list[int]  # the dataset's rows, in document order


def assign(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit over a few open rows, in the given order: -> item indices of each packed row.

    No length may exceed the capacity: cut documents when the dataset is opened.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (room left, items)
    for item, length in enumerate(lengths):
        assert length <= capacity, (length, capacity)
        fitting = [slot for slot, (room, _) in enumerate(open_rows) if room >= length]
        if fitting:
            slot = min(fitting, key=lambda i: open_rows[i][0])
            room, items = open_rows[slot]
            items.append(item)
            open_rows[slot] = (room - length, items)
            continue
        if len(open_rows) == NUM_OPEN:
            fullest = min(range(NUM_OPEN), key=lambda i: open_rows[i][0])
            rows.append(open_rows.pop(fullest)[1])
        open_rows.append((capacity - length, [item]))
    return rows + [items for _, items in open_rows]


def pack(dataset: Dataset, indices: Sequence[int], capacity: int) -> PackedRow:
    """One packed row of exactly `capacity` tokens."""
    rows = [dataset[i] for i in indices]
    tokens = [torch.as_tensor(r.token_ids) for r in rows]
    masks = [torch.as_tensor(r.loss_mask) for r in rows]
    return lay_out(tokens, masks, list(indices), capacity)


def lay_out(
    tokens: Sequence[Tensor], masks: Sequence[Tensor], indices: list[int], capacity: int
) -> PackedRow:
    lengths = torch.tensor([len(t) for t in tokens])
    used = int(lengths.sum())
    assert used <= capacity, (used, capacity)
    token_ids = torch.zeros(capacity, dtype=torch.long)
    loss_mask = torch.zeros(capacity, dtype=torch.bool)
    document = len(tokens) + torch.arange(capacity, dtype=torch.int32)
    position = torch.zeros(capacity, dtype=torch.int32)
    token_ids[:used] = torch.cat(list(tokens))
    loss_mask[:used] = torch.cat(list(masks)).bool()
    document[:used] = torch.arange(len(tokens), dtype=torch.int32).repeat_interleave(lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    position[:used] = (torch.arange(used) - starts).int()
    return PackedRow(token_ids, document, position, loss_mask, indices)

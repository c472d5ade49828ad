"""One packed row's elements as S segments, each with the context it needs, for less memory.

A segment charges the depth-0 elements with anchor in [B_s, B_s+1) and the rollouts with
anchor + 1 in it, and holds, uncharged, the real rows that those may see. Forward and backward run
segment by segment under one shared denominator: loss and gradients equal those of S = 1.

Boundaries are set so that the largest segment is as small as possible, context included: with
equal ranges of positions the last segment would hold nearly everything. Context begins at the
segment's first document, not at slot 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.models.masks import Elements

PADDING_DOCUMENT = 1 << 30  # beyond every real document


class Segment(NamedTuple):
    """Rows of one forward pass: real rows of slots [first, last), mask rows, padding.

    `anchor` counts slots of the packed row; positions restart with each document.
    """

    first: int
    last: int
    num_masks: int
    elements: Elements  # [R] each
    positions: Tensor  # [R]
    rows: Tensor  # [C]: the charged rows, then padding of weight 0
    slots: Tensor  # [C]: slot of the target state that predicts the row's token
    labels: Tensor  # [C]: that token
    weights: Tensor  # [C], before the denominator

    def to(self, device: torch.device) -> Segment:
        moved = (f.to(device, non_blocking=True) for f in (self.positions, *self[5:]))
        elements = Elements(*(f.to(device, non_blocking=True) for f in self.elements))
        positions, rows, slots, labels, weights = moved
        return self._replace(
            elements=elements,
            positions=positions,
            rows=rows,
            slots=slots,
            labels=labels,
            weights=weights,
        )

    def pin(self) -> Segment:
        fields = {
            name: getattr(self, name).pin_memory()
            for name in ("positions", "rows", "slots", "labels", "weights")
        }
        return self._replace(elements=Elements(*(f.pin_memory() for f in self.elements)), **fields)

    @property
    def charged_depth(self) -> Tensor:
        """[C]: the depth of each charged row."""
        return self.elements.depth[self.rows]


def segment_sizes(row: PackedRow, counts: Tensor, boundaries: list[int]) -> list[int]:
    """Rows of each segment, context included."""
    load = _Load(row, counts)
    return [load.rows(b, e) for b, e in pairwise(boundaries)]


def balanced_boundaries(row: PackedRow, counts: Tensor, num_segments: int) -> list[int]:
    """0 = B_0 <= ... <= B_S = n with the smallest possible largest segment.

    Binary search over the size that each segment may have: filling segments greedily up to a
    size uses the fewest segments that this size allows.
    """
    if num_segments == 1:
        return [0, len(row.token_ids)]
    load = _Load(row, counts)
    low, high = 1, load.rows(0, load.n)
    while low < high:
        middle = (low + high) // 2
        if len(load.fill(middle)) - 1 <= num_segments and load.fits(middle):
            high = middle
        else:
            low = middle + 1
    boundaries = load.fill(high)
    return boundaries + [load.n] * (num_segments + 1 - len(boundaries))


def boundaries_under(row: PackedRow, counts: Tensor, max_rows: int) -> list[int]:
    """As few segments as possible, none above `max_rows` rows where that can be."""
    return _Load(row, counts).fill(max_rows)


class _Load:
    """Running sums that give any segment's rows in O(1)."""

    def __init__(self, row: PackedRow, counts: Tensor) -> None:
        self.n = len(row.token_ids)
        masks = (counts - 1).clamp(min=0)  # depth 0 is a real row
        # masks_before[x]: mask rows whose anchor + 1 lies before slot x
        self.masks_before = torch.zeros(self.n + 1, dtype=torch.long)
        self.masks_before[2:] = masks.cumsum(0)[:-1]
        self.total_before = self.masks_before + torch.arange(self.n + 1)
        self.document_start = document_starts(row)

    def rows(self, begin: int, end: int) -> int:
        if begin == end:
            return 0
        context = end - int(self.document_start[begin])
        return context + int(self.masks_before[end] - self.masks_before[begin])

    def fill(self, max_rows: int) -> list[int]:
        boundaries = [0]
        while boundaries[-1] < self.n:
            begin = boundaries[-1]
            room = max_rows + int(self.document_start[begin]) + int(self.masks_before[begin])
            end = int(torch.searchsorted(self.total_before, room, right=True)) - 1
            boundaries.append(max(end, begin + 1))  # a slot that alone exceeds the size
        return boundaries

    def fits(self, max_rows: int) -> bool:
        b = self.fill(max_rows)
        return all(self.rows(x, y) <= max_rows for x, y in pairwise(b))


def document_starts(row: PackedRow) -> Tensor:
    """[n]: the slot at which each slot's document starts."""
    index = torch.arange(len(row.token_ids))
    is_start = torch.ones_like(index, dtype=torch.bool)
    is_start[1:] = row.document[1:] != row.document[:-1]
    return torch.where(is_start, index, 0).cummax(0).values

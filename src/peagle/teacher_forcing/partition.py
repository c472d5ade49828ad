"""A packed row's elements (anchor, depth) as segments: the rows of one forward pass each.

S segments take less memory than one. A segment has in its loss the rollouts, depth 0 included,
with anchor + 1 in [B_s, B_s+1), and holds as context the real rows that those may see. Forward and
backward run segment by segment under one shared denominator: loss and gradients equal those of
S = 1, also where a row's weight depends on the other rows of its rollout.

Boundaries are set so that the largest segment is as small as possible, context included: with
equal ranges of positions the last segment would hold nearly everything. Context begins at the
segment's first document, not at slot 0, and where a head has sliding windows, no further back than
they reach through all its layers (`reach`).

Shapes: n tokens of a packed row, R rows of a segment, C loss rows, K depths.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    rows: Tensor  # [C]: the rows whose logits the loss reads, then padding of weight 0
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
    def loss_depth(self) -> Tensor:
        """[C]: the depth of each loss row."""
        return self.elements.depth[self.rows]


class Shapes(NamedTuple):
    """Sizes that compiled code sees. Few distinct shapes mean few compilations."""

    max_masks: int | None = None  # mask rows that a packed row may have; None: as drawn
    row_multiple: int = 1  # a segment's rows are padded up to a multiple ...
    loss_row_multiple: int = 1  # ... and its loss rows


UNPADDED = Shapes()


def supervised_runs(row: PackedRow) -> Tensor:
    """[n]: how many tokens from slot + 2 on are supervised without a gap, in the same document.

    Element (slot, d) predicts the token at slot + d + 2, so it may be in the loss iff d < run. The
    first two tokens of a document are predicted by no row: there is no anchor -1.
    """
    n = len(row.token_ids)
    index = torch.arange(n)
    starts_document = torch.ones(n, dtype=torch.bool)
    starts_document[1:] = row.document[1:] != row.document[:-1]
    ends_run = torch.where(starts_document | ~row.loss_mask, index, n)
    next_end = torch.full((n,), n)
    next_end[:-1] = ends_run.flip(0).cummin(0).values.flip(0)[1:]  # strictly after each token
    run_from = torch.where(row.loss_mask, next_end - index, 0)
    runs = torch.zeros(n, dtype=torch.long)
    same_document = row.document[2:] == row.document[:-2]
    runs[:-2] = torch.where(same_document, run_from[2:], 0)
    return runs


def build_segments(
    row: PackedRow,
    counts: Tensor,  # [n]: elements in the loss per anchor, from COD
    boundaries: list[int],
    depth_weights: Tensor,  # [K]
    shapes: Shapes = UNPADDED,
    reach: int | None = None,  # rows before a row that its state depends on; None: all
) -> list[Segment]:
    starts = context_starts(row, reach)
    return [
        pad_segment(_segment(row, counts, int(starts[begin]), begin, end, depth_weights), shapes)
        for begin, end in pairwise(boundaries)
        if begin < end
    ]


def _segment(
    row: PackedRow, counts: Tensor, first: int, begin: int, end: int, depth_weights: Tensor
) -> Segment:
    real = torch.arange(first, end)
    anchors = torch.arange(max(begin - 1, 0), end - 1)  # rollouts go by anchor + 1
    num_masks = (counts[anchors] - 1).clamp(min=0)
    mask_slot = anchors.repeat_interleave(num_masks)
    before = (num_masks.cumsum(0) - num_masks).repeat_interleave(num_masks)
    mask_depth = torch.arange(len(mask_slot)) - before + 1

    slot = torch.cat((real, mask_slot))
    depth = torch.cat((torch.zeros_like(real), mask_depth))
    real_loss_rows = anchors[counts[anchors] > 0] - first
    rows = torch.cat((real_loss_rows, torch.arange(len(real), len(slot))))
    at = (slot + depth)[rows]  # the loss rows' own places in the packed row
    return Segment(
        first=first,
        last=end,
        num_masks=len(mask_slot),
        elements=Elements(slot.int(), depth.int(), row.document[slot]),
        positions=row.position[slot].long() + depth,
        rows=rows,
        slots=at + 1,
        labels=row.token_ids[at + 2],
        weights=depth_weights[depth[rows]],
    )


def unrolled_segment(
    row: PackedRow,
    counts: Tensor,  # [n]: elements in the loss per anchor
    depth_weights: Tensor,  # [K]
    shapes: Shapes = UNPADDED,
) -> Segment:
    """EAGLE-3's only segment: all anchors run at every step, step by step one behind the other."""
    n, num_steps = len(row.token_ids), len(depth_weights)
    slot = torch.arange(n).repeat(num_steps)
    depth = torch.arange(num_steps).repeat_interleave(n)
    rows = torch.nonzero(depth < counts.repeat(num_steps)).flatten()
    at = (slot + depth)[rows]
    segment = Segment(
        first=0,
        last=n,
        num_masks=0,
        elements=Elements(slot.int(), depth.int(), row.document.repeat(num_steps)),
        positions=row.position.long().repeat(num_steps) + depth,
        rows=rows,
        slots=at + 1,
        labels=row.token_ids[at + 2],
        weights=depth_weights[depth[rows]],
    )
    return pad_segment(segment, shapes._replace(max_masks=None, row_multiple=1))


def pad_segment(segment: Segment, shapes: Shapes) -> Segment:
    """Padding rows are documents of their own; padding loss rows point at row 0 with weight 0."""
    more = -len(segment.positions) % shapes.row_multiple
    more_loss_rows = -len(segment.rows) % shapes.loss_row_multiple
    anchor, depth, document = segment.elements
    alone = PADDING_DOCUMENT + torch.arange(more, dtype=torch.int32)
    return segment._replace(
        elements=Elements(
            torch.cat((anchor, alone)), F.pad(depth, (0, more)), torch.cat((document, alone))
        ),
        positions=F.pad(segment.positions, (0, more)),
        rows=F.pad(segment.rows, (0, more_loss_rows)),
        slots=F.pad(segment.slots, (0, more_loss_rows)),
        labels=F.pad(segment.labels, (0, more_loss_rows)),
        weights=F.pad(segment.weights, (0, more_loss_rows)),
    )


def segment_sizes(
    row: PackedRow, counts: Tensor, boundaries: list[int], reach: int | None = None
) -> list[int]:
    """Rows of each segment, context included."""
    load = _SegmentRows(row, counts, reach)
    return [load.rows(b, e) for b, e in pairwise(boundaries)]


def balanced_boundaries(
    row: PackedRow, counts: Tensor, num_segments: int, reach: int | None = None
) -> list[int]:
    """0 = B_0 <= ... <= B_S = n with the smallest possible largest segment.

    Binary search over the size that each segment may have: filling segments greedily up to a
    size uses the fewest segments that this size allows.
    """
    if num_segments == 1:
        return [0, len(row.token_ids)]
    load = _SegmentRows(row, counts, reach)
    low, high = 1, load.rows(0, load.n)
    while low < high:
        middle = (low + high) // 2
        if len(load.fill(middle)) - 1 <= num_segments and load.fits(middle):
            high = middle
        else:
            low = middle + 1
    boundaries = load.fill(high)
    return boundaries + [load.n] * (num_segments + 1 - len(boundaries))


def boundaries_under(
    row: PackedRow, counts: Tensor, max_rows: int, reach: int | None = None
) -> list[int]:
    """Boundaries of as few segments as possible, none above `max_rows` rows where that can be."""
    return _SegmentRows(row, counts, reach).fill(max_rows)


class _SegmentRows:
    """Running sums that give any segment's rows in O(1)."""

    def __init__(self, row: PackedRow, counts: Tensor, reach: int | None) -> None:
        self.n = len(row.token_ids)
        masks = (counts - 1).clamp(min=0)  # depth 0 is a real row
        # masks_before[x]: mask rows whose anchor + 1 lies before slot x
        self.masks_before = torch.zeros(self.n + 1, dtype=torch.long)
        self.masks_before[2:] = masks.cumsum(0)[:-1]
        self.total_before = self.masks_before + torch.arange(self.n + 1)
        self.context_start = context_starts(row, reach)

    def rows(self, begin: int, end: int) -> int:
        if begin == end:
            return 0
        context = end - int(self.context_start[begin])
        return context + int(self.masks_before[end] - self.masks_before[begin])

    def fill(self, max_rows: int) -> list[int]:
        boundaries = [0]
        while boundaries[-1] < self.n:
            begin = boundaries[-1]
            room = max_rows + int(self.context_start[begin]) + int(self.masks_before[begin])
            end = int(torch.searchsorted(self.total_before, room, right=True)) - 1
            boundaries.append(max(end, begin + 1))  # a slot that alone exceeds the size
        return boundaries

    def fits(self, max_rows: int) -> bool:
        b = self.fill(max_rows)
        return all(self.rows(x, y) <= max_rows for x, y in pairwise(b))


def context_starts(row: PackedRow, reach: int | None) -> Tensor:
    """[n]: the first slot of the context of a segment that begins at each slot: that of its
    document, or the first that the rollout before the slot depends on."""
    index = torch.arange(len(row.token_ids))
    is_start = torch.ones_like(index, dtype=torch.bool)
    is_start[1:] = row.document[1:] != row.document[:-1]
    starts = torch.where(is_start, index, 0).cummax(0).values
    return starts if reach is None else torch.maximum(starts, index - 1 - reach)

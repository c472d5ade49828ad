"""Builds the segments of a packed row: which rows run, which are charged, and for what."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.models.masks import Elements
from peagle.train.partition import PADDING_DOCUMENT, Segment, document_starts


class Shapes(NamedTuple):
    """Sizes that compiled code sees. Few distinct shapes mean few compilations."""

    max_masks: int | None = None  # mask rows that a packed row may have; None: as drawn
    row_multiple: int = 1  # a segment's rows are padded up to a multiple ...
    charged_multiple: int = 1  # ... and its charged rows


UNPADDED = Shapes()


def build_segments(
    row: PackedRow,
    counts: Tensor,  # [n]: elements charged per anchor, from COD
    boundaries: list[int],
    depth_weights: Tensor,  # [K]
    shapes: Shapes = UNPADDED,
) -> list[Segment]:
    starts = document_starts(row)
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
    charged_real = torch.arange(begin, end)[counts[begin:end] > 0] - first
    rows = torch.cat((charged_real, torch.arange(len(real), len(slot))))
    at = (slot + depth)[rows]  # the charged rows' own places in the packed row
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


def pad_segment(segment: Segment, shapes: Shapes) -> Segment:
    """Padding rows are documents of their own; padding charges point at row 0 with weight 0."""
    more = -len(segment.positions) % shapes.row_multiple
    more_charged = -len(segment.rows) % shapes.charged_multiple
    anchor, depth, document = segment.elements
    alone = PADDING_DOCUMENT + torch.arange(more, dtype=torch.int32)
    return segment._replace(
        elements=Elements(
            torch.cat((anchor, alone)), F.pad(depth, (0, more)), torch.cat((document, alone))
        ),
        positions=F.pad(segment.positions, (0, more)),
        rows=F.pad(segment.rows, (0, more_charged)),
        slots=F.pad(segment.slots, (0, more_charged)),
        labels=F.pad(segment.labels, (0, more_charged)),
        weights=F.pad(segment.weights, (0, more_charged)),
    )

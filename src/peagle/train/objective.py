"""What the two methods train: how a packed row becomes segments, and a segment charged states."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peagle.data.packing import PackedRow
from peagle.models.eagle import EagleNetwork
from peagle.models.masks import Elements
from peagle.train.cod import draw_depths, supervised_runs
from peagle.train.eagle3 import unroll
from peagle.train.features import Features, Fetched
from peagle.train.p_eagle import charged_states
from peagle.train.partition import Segment, balanced_boundaries, boundaries_under
from peagle.train.segments import UNPADDED, Shapes, build_segments, pad_segment


class PlannedRow(NamedTuple):
    """A packed row with the elements that were drawn for it."""

    row: PackedRow
    segments: list[Segment]
    weight: float  # sum of all charged weights: this row's part of the denominator
    num_cut: int  # elements dropped because the padded size was full
    fetched: Fetched = None


class Planner(abc.ABC):
    """Draws elements and lays them out. Runs on CPU, ahead of the step."""

    def __init__(
        self,
        retention: Tensor,  # [K]
        depth_weights: Tensor,  # [K]
        *,
        draft_ids: Tensor | None = None,  # [V]: draft id of each target id, -1 where there is none
        num_segments: int = 1,
        max_rows: int | None = None,  # of one segment: then as many segments as that takes
        shapes: Shapes = UNPADDED,
    ) -> None:
        self.retention = retention
        self.depth_weights = depth_weights
        self.draft_ids = draft_ids
        self.num_segments = num_segments
        self.max_rows = max_rows
        self.shapes = shapes

    @abc.abstractmethod
    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow: ...

    def draw(self, row: PackedRow, generator: torch.Generator) -> tuple[Tensor, int]:
        """-> [n] elements charged per anchor, and how many were cut to keep the size."""
        counts = draw_depths(supervised_runs(row), self.retention, generator)
        return limit_masks(counts, self.shapes.max_masks)

    def finish(self, row: PackedRow, segments: list[Segment], num_cut: int) -> PlannedRow:
        segments = [self._in_draft_ids(s) for s in segments]
        weight = float(sum(s.weights.sum(dtype=torch.float64) for s in segments))
        return PlannedRow(row, segments, weight, num_cut)

    def _in_draft_ids(self, segment: Segment) -> Segment:
        """Labels as draft ids. A token that the drafter cannot say is not charged."""
        if self.draft_ids is None:
            return segment
        labels = self.draft_ids[segment.labels]
        weights = torch.where(labels >= 0, segment.weights, 0.0)
        return segment._replace(labels=labels.clamp(min=0), weights=weights)


class PEaglePlanner(Planner):
    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow:
        counts, num_cut = self.draw(row, generator)
        num_segments = self.num_segments
        if self.max_rows is not None:
            num_segments = len(boundaries_under(row, counts, self.max_rows)) - 1
        boundaries = balanced_boundaries(row, counts, num_segments)
        segments = build_segments(row, counts, boundaries, self.depth_weights, self.shapes)
        return self.finish(row, segments, num_cut)


class Eagle3Planner(Planner):
    """All anchors run at every step; COD thins out which of them are charged."""

    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow:
        counts, num_cut = self.draw(row, generator)
        n = len(row.token_ids)
        num_steps = len(self.retention)
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
            weights=self.depth_weights[depth[rows]],
        )
        segment = pad_segment(segment, self.shapes._replace(max_masks=None, row_multiple=1))
        return self.finish(row, [segment], num_cut)


def limit_masks(counts: Tensor, max_masks: int | None) -> tuple[Tensor, int]:
    """Cuts the last rollouts so that no more than `max_masks` elements are deeper than 0."""
    if max_masks is None:
        return counts, 0
    masks = (counts - 1).clamp(min=0)
    room = (max_masks - (masks.cumsum(0) - masks)).clamp(min=0)
    kept = torch.minimum(masks, room)
    return counts - (masks - kept), int((masks - kept).sum())


class DraftModel(nn.Module):
    """The network with the forward pass that training needs: what DDP and FSDP wrap."""

    def __init__(self, network: EagleNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, segment: Segment, features: Features) -> tuple[Tensor, Tensor]:
        """-> charged states after the final norm [C, H], and the output table [Vd, H]."""
        if self.network.config.method == "p-eagle":
            states = charged_states(self.network, segment, features)
        else:
            states = self._unrolled_states(segment, features)
        return states, self.network.output_weight()

    def _unrolled_states(self, segment: Segment, features: Features) -> Tensor:
        n = segment.last
        document, position = segment.elements.document[:n], segment.positions[:n]
        steps = unroll(self.network, features, document, position, len(segment.positions) // n)
        out: Tensor = self.network.norm(torch.cat(steps).index_select(0, segment.rows))
        return out

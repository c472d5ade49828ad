"""What is drawn from a packed row, and how it is laid out as segments, for either method."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.errors import ConfigError
from peagle.models.eagle import EagleNetwork
from peagle.models.head_config import HeadConfig
from peagle.teacher_forcing.features import Fetched
from peagle.teacher_forcing.partition import (
    UNPADDED,
    Segment,
    Shapes,
    balanced_boundaries,
    boundaries_under,
    build_segments,
    supervised_runs,
    unrolled_segment,
)
from peagle.train.cod import draw_depths, limit_masks, retentions
from peagle.train.recipe import Recipe


class PlannedRow(NamedTuple):
    """A packed row with the elements that were drawn for it."""

    row: PackedRow
    segments: list[Segment]
    weight: float  # sum over all loss rows: this row's part of the denominator
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
        reach: int | None = None,  # HeadConfig.reach
        shapes: Shapes = UNPADDED,
    ) -> None:
        self.retention = retention
        self.depth_weights = depth_weights
        self.draft_ids = draft_ids
        self.num_segments = num_segments
        self.max_rows, self.reach = max_rows, reach
        self.shapes = shapes

    @abc.abstractmethod
    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow: ...

    def draw(self, row: PackedRow, generator: torch.Generator) -> tuple[Tensor, int]:
        """-> [n] elements in the loss per anchor, and how many were cut to keep the size."""
        counts = draw_depths(supervised_runs(row), self.retention, generator)
        return limit_masks(counts, self.shapes.max_masks)

    def finish(self, row: PackedRow, segments: list[Segment], num_cut: int) -> PlannedRow:
        segments = [self._in_draft_ids(s) for s in segments]
        weight = float(sum(s.weights.sum(dtype=torch.float64) for s in segments))
        return PlannedRow(row, segments, weight, num_cut)

    def _in_draft_ids(self, segment: Segment) -> Segment:
        """Labels as draft ids. A token that the drafter cannot propose is not in the loss."""
        if self.draft_ids is None:
            return segment
        labels = self.draft_ids[segment.labels]
        weights = torch.where(labels >= 0, segment.weights, 0.0)
        return segment._replace(labels=labels.clamp(min=0), weights=weights)


class PEaglePlanner(Planner):
    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow:
        counts, num_cut = self.draw(row, generator)
        num_segments, reach = self.num_segments, self.reach
        if self.max_rows is not None:
            num_segments = len(boundaries_under(row, counts, self.max_rows, reach)) - 1
        boundaries = balanced_boundaries(row, counts, num_segments, reach)
        segments = build_segments(row, counts, boundaries, self.depth_weights, self.shapes, reach)
        return self.finish(row, segments, num_cut)


class Eagle3Planner(Planner):
    """All anchors run at every step; COD thins out which of them are in the loss."""

    def __call__(self, row: PackedRow, generator: torch.Generator) -> PlannedRow:
        counts, num_cut = self.draw(row, generator)
        segment = unrolled_segment(row, counts, self.depth_weights, self.shapes)
        return self.finish(row, [segment], num_cut)


def build_planner(recipe: Recipe, head: HeadConfig, draft_ids: Tensor | None = None) -> Planner:
    check_method(recipe)
    depths = head.max_speculative_tokens
    kind = PEaglePlanner if recipe.head.method == "p-eagle" else Eagle3Planner
    retention = retentions(depths, recipe.cod.retention, recipe.cod.floor)
    depth_weights = recipe.loss.depth_decay ** torch.arange(depths)
    if recipe.loss.weighting == "acceptance":
        # Depths that are seldom drawn stand for those that are not: the expected acceptance length
        # is then, on average over the draws, that of whole rollouts.
        depth_weights = depth_weights / retention.to(depth_weights.dtype)
    return kind(
        retention,
        depth_weights,
        draft_ids=draft_ids,
        num_segments=recipe.run.partitions if isinstance(recipe.run.partitions, int) else 1,
        reach=head.reach,
    )


def draft_ids(network: EagleNetwork) -> Tensor | None:
    """For the planner, which works on CPU; None: they are the target's ids."""
    return network.draft_ids().cpu() if network.config.reduced_vocabulary else None


def check_method(recipe: Recipe) -> None:
    """A chain of EAGLE-3 leaves keys behind as it runs: it is neither cut nor run again."""
    if recipe.head.method == "p-eagle":
        return
    options = {
        "run.partitions": recipe.run.partitions != 1,
        "run.activation_checkpointing": recipe.run.activation_checkpointing,
    }
    for name, used in options.items():
        if used:
            raise ConfigError(
                f"{name} works with p-eagle heads only",
                hint="for less memory lower data.tokens_per_row or head.max_speculative_tokens",
            )

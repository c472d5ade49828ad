"""What all steps of a lane engine share: models, lane state, caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.lane_state import LaneState
from peagle.kernels.rows import PagedRows
from peagle.kernels.step_ops import StepOps
from peagle.models.lane_drafters import LaneDrafter
from peagle.models.rows_attention import RowsAttention
from peagle.models.target import TargetModel


@dataclass(frozen=True)
class PagedModel:
    """A model's cache and the limits of its rows."""

    cache: PagedKVCache
    block_size: int
    max_position: int  # the last that the rotary table has

    def attention(
        self,
        ops: StepOps,
        block_tables: Tensor,
        tables: Tensor,
        starts: Tensor,
        counts: Tensor,
        rows_per_item: int,
        num_splits: int,
    ) -> tuple[RowsAttention, Tensor]:
        """Attention for rows that `counts` says are real, and their positions."""
        keys, values = self.cache.keys, self.cache.values
        trash_slot = keys.shape[1] - 1
        plan = ops.plan_rows(
            block_tables,
            tables,
            starts,
            counts,
            rows_per_item,
            self.block_size,
            trash_slot,
            self.max_position,
        )
        rows = PagedRows(
            block_tables=block_tables,
            tables=plan.tables,
            starts=plan.starts,
            ends=plan.ends,
            positions=plan.positions,
            slots=plan.slots,
            rows_per_item=rows_per_item,
            block_size=self.block_size,
            num_splits=num_splits,
        )
        return RowsAttention(rows, keys, values), plan.positions


@dataclass(frozen=True)
class LaneDrafting:
    """The drafter's side, where there is one."""

    drafter: LaneDrafter
    model: PagedModel
    tap_layers: tuple[int, ...]
    max_draft_tokens: int  # a longer request is not drafted for


@dataclass(frozen=True)
class LaneModels:
    target: TargetModel
    model: PagedModel
    drafting: LaneDrafting | None
    state: LaneState
    ops: StepOps

    @property
    def device(self) -> torch.device:
        return self.state.limits.device

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.drafting.tap_layers if self.drafting else ()

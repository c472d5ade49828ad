"""What all steps of a lane engine share: models, lane state, caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.lane_state import LaneState, make_lane_state
from peagle.kernels.rows import PagedRows
from peagle.kernels.step_ops import StepOps, step_ops
from peagle.models.lane_drafters import LaneDrafter, lane_drafter
from peagle.models.rows_attention import RowsAttention
from peagle.models.target import TargetModel

if TYPE_CHECKING:
    from peagle.engine.engine import Engine

# Lanes keep hidden states for so many drafts, even if the engine's own K is smaller.
MIN_LANE_DEPTH = 16


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


def lane_models(engine: Engine, num_lanes: int) -> LaneModels:
    """Over the engine's own caches."""
    target, drafting = engine.target, _lane_drafting(engine)
    weight = target.embed_tokens.weight
    depth = width = 0
    if engine.speculation is not None:
        drafter = engine.speculation.drafter
        depth = min(drafter.max_speculative_tokens, MIN_LANE_DEPTH)
        depth = max(depth, engine.speculation.num_speculative_tokens)
        width = len(drafter.tap_layers) * target.config.hidden_size
    max_blocks = engine.allocator.blocks_for(engine.max_model_len)
    state = make_lane_state(num_lanes, max_blocks, depth + 1, width, weight)
    last_position = target.config.max_position_embeddings - 1
    model = PagedModel(engine.runner.target_cache, engine.allocator.block_size, last_position)
    return LaneModels(target, model, drafting, state, step_ops(weight.device))


def _lane_drafting(engine: Engine) -> LaneDrafting | None:
    if engine.speculation is None:
        return None
    drafter, cache = engine.speculation.drafter, engine.runner.draft_cache
    lanes, positions = lane_drafter(drafter), drafter.max_positions
    assert lanes is not None
    assert cache is not None
    assert positions is not None
    model = PagedModel(cache, engine.allocator.block_size, positions - 1)
    return LaneDrafting(lanes, model, drafter.tap_layers, positions + 1)

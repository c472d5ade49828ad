"""The operations of a step that exist twice: as plain torch and as Triton kernels.

Chosen once per engine by `step_ops`; tests/kernels/gpu holds that both agree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.kernels.lane_state import LaneState, RowPlan, StepCounts
from peagle.kernels.plain import lanes as plain
from peagle.kernels.plain.choose import Chosen, RowRules
from peagle.kernels.plain.choose import choose_tokens as plain_choose_tokens


class BeginStep(Protocol):
    def __call__(
        self, state: LaneState, lanes: Tensor, depth: int, max_draft_tokens: int
    ) -> StepCounts: ...


class PlanRows(Protocol):
    def __call__(
        self,
        block_tables: Tensor,
        tables: Tensor,
        starts: Tensor,
        counts: Tensor,
        rows_per_item: int,
        block_size: int,
        trash_slot: int,
        max_position: int,
    ) -> RowPlan: ...


class ExpandRows(Protocol):
    def __call__(self, real: Tensor, num_real: Tensor, mask: Tensor, num_rows: int) -> Tensor: ...


class PickRows(Protocol):
    def __call__(
        self, hidden: Tensor, num_pending: Tensor, rows_per_lane: int, count: int
    ) -> Tensor: ...


class Commit(Protocol):
    def __call__(
        self,
        state: LaneState,
        lanes: Tensor,
        counts: StepCounts,
        drafts: Tensor,
        chosen: Tensor,
        usable: Tensor,
        taps: Tensor | None,
    ) -> Tensor: ...


class ChooseTokens(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rules: RowRules | None,
        ids: Tensor | None,
        *,
        filters: bool = True,
    ) -> Chosen: ...


class StepOps(NamedTuple):
    begin_step: BeginStep
    plan_rows: PlanRows
    expand_rows: ExpandRows
    pick_rows: PickRows
    commit: Commit
    choose_tokens: ChooseTokens


def step_ops(device: torch.device) -> StepOps:
    if device.type == "cuda":
        from peagle.kernels.gpu.choose import choose_tokens
        from peagle.kernels.gpu.lanes import (
            begin_step,
            commit,
            expand_rows,
            pick_rows,
            plan_rows,
        )

        return StepOps(begin_step, plan_rows, expand_rows, pick_rows, commit, choose_tokens)
    return StepOps(
        plain.begin_step,
        plain.plan_rows,
        plain.expand_rows,
        plain.pick_rows,
        plain.commit,
        plain_choose_tokens,
    )

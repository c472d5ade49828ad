"""The operations of a step that exist twice: as plain torch and as Triton kernels.

Chosen once per engine by `step_ops`; tests/kernels/gpu holds that both agree.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.kernels.lane_state import LaneState, RowPlan, StepCounts
from peagle.kernels.plain import best_token as plain_best_token
from peagle.kernels.plain import choose as plain_choose
from peagle.kernels.plain import lanes as plain_lanes
from peagle.kernels.plain import rejection as plain_rejection
from peagle.kernels.plain import row_copies as plain_row_copies
from peagle.kernels.plain.choose import Chosen, Laws, RowRules
from peagle.kernels.plain.rejection import Coins, Verdict


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


class EmbedRows(Protocol):
    def __call__(
        self, table: Tensor, token_ids: Tensor, num_real: Tensor, mask: Tensor, num_rows: int
    ) -> Tensor: ...


class EmbedTokens(Protocol):
    def __call__(self, table: Tensor, first: Tensor, others: Tensor) -> Tensor: ...


class GatherTaps(Protocol):
    def __call__(self, pending_taps: Tensor, lanes: Tensor, count: int) -> Tensor: ...


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


class BestTokens(Protocol):
    def __call__(self, hidden: Tensor, weight: Tensor, ids: Tensor | None) -> Chosen: ...


class ChooseTokens(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rules: RowRules | None,
        ids: Tensor | None,
        *,
        filters: bool = True,
    ) -> Chosen: ...


class ChooseWithLaws(Protocol):
    def __call__(
        self,
        logits: Tensor,
        rules: RowRules,
        ids: Tensor | None,
        laws: Tensor,
        *,
        filters: bool = True,
    ) -> Chosen: ...


class TokenLaws(Protocol):
    def __call__(self, logits: Tensor, rules: RowRules, *, filters: bool = True) -> Laws: ...


class RejectionCoins(Protocol):
    def __call__(self, seeds: Tensor, outputs: Tensor, depth: int) -> Coins: ...


class VerifyRejection(Protocol):
    def __call__(
        self,
        target_probs: Tensor,
        draft_probs: Tensor,
        draft_tokens: Tensor,
        num_drafts: Tensor,
        accept_coins: Tensor,
        residual_coins: Tensor,
    ) -> Verdict: ...


class StepOps(NamedTuple):
    begin_step: BeginStep
    plan_rows: PlanRows
    expand_rows: ExpandRows
    embed_rows: EmbedRows
    embed_tokens: EmbedTokens
    gather_taps: GatherTaps
    pick_rows: PickRows
    commit: Commit
    best_tokens: BestTokens
    choose_tokens: ChooseTokens
    choose_with_laws: ChooseWithLaws
    token_laws: TokenLaws
    rejection_coins: RejectionCoins
    verify_rejection: VerifyRejection


def step_ops(device: torch.device) -> StepOps:
    return _on_gpu() if device.type == "cuda" else _plain()


def _on_gpu() -> StepOps:
    from peagle.kernels.gpu import best_token, choose, lanes, rejection, row_copies

    return StepOps(
        lanes.begin_step,
        lanes.plan_rows,
        row_copies.expand_rows,
        row_copies.embed_rows,
        row_copies.embed_tokens,
        row_copies.gather_taps,
        row_copies.pick_rows,
        lanes.commit,
        best_token.best_tokens,
        choose.choose_tokens,
        choose.choose_with_laws,
        choose.token_laws,
        rejection.rejection_coins,
        rejection.verify_rejection,
    )


def _plain() -> StepOps:
    return StepOps(
        plain_lanes.begin_step,
        plain_lanes.plan_rows,
        plain_row_copies.expand_rows,
        plain_row_copies.embed_rows,
        plain_row_copies.embed_tokens,
        plain_row_copies.gather_taps,
        plain_row_copies.pick_rows,
        plain_lanes.commit,
        plain_best_token.best_tokens,
        plain_choose.choose_tokens,
        plain_choose.choose_with_laws,
        plain_choose.token_laws,
        plain_rejection.rejection_coins,
        plain_rejection.verify_rejection,
    )

"""The operations of a step that exist twice: as torch operations and as Triton kernels.

Chosen once per engine by `step_ops`. Signatures and meaning are the reference's, in
kernels/reference; tests/kernels/gpu holds that both agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.device_batch import Committed, RowPlan, StepCounts
from peagle.kernels.reference.choose import Chosen, Laws
from peagle.kernels.reference.rejection import Coins, Verdict


class StepOps(NamedTuple):
    # batch.py
    begin_step: Callable[..., StepCounts]
    plan_rows: Callable[..., RowPlan]
    commit: Callable[..., Committed]
    store_drafts: Callable[..., None]
    # row_copies.py
    expand_rows: Callable[..., Tensor]
    embed_rows: Callable[..., Tensor]
    embed_tokens: Callable[..., Tensor]
    pick_rows: Callable[..., Tensor]
    # best_token.py, choose.py, rejection.py
    best_tokens: Callable[..., Chosen]
    choose_tokens: Callable[..., Chosen]
    choose_with_laws: Callable[..., Chosen]
    token_laws: Callable[..., Laws]
    rejection_coins: Callable[..., Coins]
    verify_rejection: Callable[..., Verdict]


def step_ops(device: torch.device) -> StepOps:
    if device.type == "cuda":
        from peagle.kernels.gpu import batch, best_token, choose, rejection, row_copies
    else:
        from peagle.kernels.reference import (  # type: ignore[no-redef]
            batch,
            best_token,
            choose,
            rejection,
            row_copies,
        )
    return StepOps(
        batch.begin_step,
        batch.plan_rows,
        batch.commit,
        batch.store_drafts,
        row_copies.expand_rows,
        row_copies.embed_rows,
        row_copies.embed_tokens,
        row_copies.pick_rows,
        best_token.best_tokens,
        choose.choose_tokens,
        choose.choose_with_laws,
        choose.token_laws,
        rejection.rejection_coins,
        rejection.verify_rejection,
    )

"""The operations of a step that exist twice: as torch operations and as kernels, for a GPU all of
them, for a CPU some.

Chosen once per engine by `step_ops`. Signatures and meaning are the reference's, in
kernels/reference; tests/kernels/gpu and tests/kernels/cpu/test_drafts.py hold that both agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.cpu.drafts import draft_kernels
from peagle.kernels.device_batch import Committed, RowPlan, StepCounts
from peagle.kernels.reference.rejection import RejectionUniforms
from peagle.kernels.reference.sampling import SampledTokens, TokenProbs
from peagle.kernels.reference.trees import BeamRows, Candidates, SharedRows, TreePath
from peagle.speculation.verify import VerifyOutput


class StepOps(NamedTuple):
    # batch.py
    begin_step: Callable[..., StepCounts]
    plan_rows: Callable[..., RowPlan]
    commit: Callable[..., Committed]
    store_drafts: Callable[..., None]
    # gather.py
    expand_rows: Callable[..., Tensor]
    embed_rows: Callable[..., Tensor]
    embed_tokens: Callable[..., Tensor]
    pick_rows: Callable[..., Tensor]
    # best_token.py, sampling.py, rejection.py
    best_tokens: Callable[..., SampledTokens]
    sample_tokens: Callable[..., SampledTokens]
    sample_with_probs: Callable[..., SampledTokens]
    token_probs: Callable[..., TokenProbs]
    rejection_uniforms: Callable[..., RejectionUniforms]
    verify_rejection: Callable[..., VerifyOutput]
    # trees.py
    top_tokens: Callable[..., Candidates]
    extend_beam: Callable[..., BeamRows]
    store_tree: Callable[..., None]
    share_rows: Callable[..., tuple[StepCounts, SharedRows]]
    best_chain: Callable[..., Tensor]
    walk_tree: Callable[..., TreePath]
    move_rows: Callable[..., None]
    path_rows: Callable[..., Tensor]


def step_ops(device: torch.device) -> StepOps:
    if device.type == "cuda":
        from peagle.kernels.gpu import batch, best_token, gather, rejection, sampling, trees
    else:
        from peagle.kernels.reference import (  # type: ignore[no-redef]
            batch,
            best_token,
            gather,
            rejection,
            sampling,
            trees,
        )
    ops = StepOps(
        batch.begin_step,
        batch.plan_rows,
        batch.commit,
        batch.store_drafts,
        gather.expand_rows,
        gather.embed_rows,
        gather.embed_tokens,
        gather.pick_rows,
        best_token.best_tokens,
        sampling.sample_tokens,
        sampling.sample_with_probs,
        sampling.token_probs,
        rejection.rejection_uniforms,
        rejection.verify_rejection,
        trees.top_tokens,
        trees.extend_beam,
        trees.store_tree,
        trees.share_rows,
        trees.best_chain,
        trees.walk_tree,
        trees.move_rows,
        trees.path_rows,
    )
    kernels = draft_kernels() if device.type == "cpu" else None
    if kernels is None:
        return ops
    return ops._replace(
        sample_tokens=kernels.sample_tokens,
        top_tokens=kernels.top_tokens,
        store_tree=kernels.store_tree,
        walk_tree=kernels.walk_tree,
        move_rows=kernels.move_rows,
    )

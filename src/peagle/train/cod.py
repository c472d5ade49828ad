"""COD, COnditional Drop-token: which elements (anchor, depth) of a packed row are trained.

Depth 0 keeps every position. Depth d keeps a position with probability max(r^d, floor), nested:
(a, d) only if (a, d-1) was kept. Depths >= 1 exist only where the target wrote what they predict.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.data.packing import PackedRow


def supervised_runs(row: PackedRow) -> Tensor:
    """[n]: how many tokens from slot + 2 on are supervised without a gap, in the same document.

    Element (slot, d) predicts the token at slot + d + 2, so it may be charged iff d < run. The
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


def retentions(num_depths: int, rate: float, floor: float) -> Tensor:
    """[num_depths]: the share of anchors that keep each depth 0, 1, ..."""
    depth = torch.arange(num_depths, dtype=torch.float64)
    return (rate**depth).clamp(min=floor)


def draw_depths(runs: Tensor, retention: Tensor, generator: torch.Generator) -> Tensor:
    """[n]: how many elements each anchor is charged for, 0 where it is context alone.

    One uniform number decides a whole rollout: depth d is kept while it lies under the share
    that d keeps. Those shares never rise with d, so what is kept is nested and contiguous.
    """
    coin = torch.rand(len(runs), generator=generator, dtype=torch.float64)
    kept = (coin[:, None] < retention).sum(1)
    return torch.minimum(kept, runs)

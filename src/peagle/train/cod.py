"""COD, COnditional Drop-token: which elements (anchor, depth) of a packed row are trained.

Depth 0 keeps every position. Depth d keeps a position with probability max(r^d, floor), nested:
(a, d) only if (a, d-1) was kept. Depths >= 1 exist only where the target wrote what they predict.
"""

from __future__ import annotations

import torch
from torch import Tensor


def retentions(num_depths: int, rate: float, floor: float) -> Tensor:
    """[num_depths]: the share of anchors that keep each depth 0, 1, ..."""
    depth = torch.arange(num_depths, dtype=torch.float64)
    return (rate**depth).clamp(min=floor)


def draw_depths(runs: Tensor, retention: Tensor, generator: torch.Generator) -> Tensor:
    """[n]: how many elements of each anchor are in the loss, 0 where it is context alone.

    One uniform number decides a whole rollout: depth d is kept while it lies under the share
    that d keeps. Those shares never rise with d, so what is kept is nested and contiguous.
    """
    uniform = torch.rand(len(runs), generator=generator, dtype=torch.float64)
    kept = (uniform[:, None] < retention).sum(1)
    return torch.minimum(kept, runs)


def limit_masks(counts: Tensor, max_masks: int | None) -> tuple[Tensor, int]:
    """Cuts the last rollouts so that no more than `max_masks` elements are deeper than 0."""
    if max_masks is None:
        return counts, 0
    masks = (counts - 1).clamp(min=0)
    room = (max_masks - (masks.cumsum(0) - masks)).clamp(min=0)
    kept = torch.minimum(masks, room)
    return counts - (masks - kept), int((masks - kept).sum())

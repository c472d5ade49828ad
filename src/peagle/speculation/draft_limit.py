"""How many drafts a request may have: the one rule that steps, kernels and tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_limit(
    max_drafts: Tensor,
    num_tokens: Tensor,
    limits: Tensor,
    capacity: Tensor,
    max_draft_tokens: int,
) -> Tensor:
    """Drafts behind `num_tokens` known tokens, the newest of which is not computed.  # [B] each

    max_drafts        # what the request asks for
    limits            # tokens at which it ends: the bonus token takes the last place
    capacity          # positions of the cache; draft d is made from the row at num_tokens + d - 3
    max_draft_tokens  # a request with more is beyond the drafter's positions
    """
    until_end = limits - num_tokens - 1
    has_room = capacity - num_tokens + 2
    in_reach = max_draft_tokens - num_tokens + 1
    fewest = torch.minimum(torch.minimum(max_drafts, until_end), has_room)
    return torch.minimum(fewest, in_reach).clamp(min=0)

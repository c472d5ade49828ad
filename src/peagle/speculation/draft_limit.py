"""How many drafts a request may have: the one rule that steps, kernels and tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def num_drafted_rows(num_tokens: int, depth: int, limit: int, max_draft_tokens: int) -> int:
    """Rows of a decoding request, from its first on, that the drafter has read for sure.

    A step in which `draft_limit` is 0 for it leaves its rows out. It may have begun depth + 1
    tokens before it found that out, and its first row is the newest token's.
    """
    rows = num_tokens - 1
    if num_tokens >= limit - 1:
        rows = min(rows, limit - depth - 3)
    if num_tokens > max_draft_tokens:
        rows = min(rows, max_draft_tokens - depth - 1)
    return max(rows, 0)


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

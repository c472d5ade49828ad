"""How many drafts a request may have: the one rule that steps, kernels and tests share."""

from __future__ import annotations

import torch
from torch import Tensor


def num_draft_rows(depth: int, rows_per_depth: int = 1) -> int:
    """Rows behind the prefix that drafts of this depth leave in the drafter's cache. The first
    comes from the prefix's last row; a chain has one row for each other, a beam several."""
    return max(depth - 1, 0) * rows_per_depth


def cache_slack(depth: int, num_nodes: int | None, rows_per_depth: int) -> int:
    """Positions behind the end of a request that rows of trees may take in a cache: its nodes when
    they are verified, or the rows that they were drafted with. Those are drafted the furthest with
    depth + 1 tokens to go, when the prefix's last row is that of the token before the newest."""
    if not num_nodes:
        return 0
    drafted = num_draft_rows(depth, rows_per_depth) - (depth + 2)
    return max(num_nodes - 1, drafted)


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
    rows_per_depth: int = 1,
) -> Tensor:
    """Drafts behind each other, behind `num_tokens` known tokens, the newest of which is not
    computed.  # [B] each

    max_drafts        # what the request asks for
    limits            # tokens at which it ends: the bonus token takes the last place
    capacity          # positions of the cache; drafts 1 .. d take `num_draft_rows` of them from
                      # num_tokens - 1 on
    max_draft_tokens  # a request with more is beyond the drafter's positions
    """
    until_end = limits - num_tokens - 1
    has_room = (capacity - num_tokens + 1 + rows_per_depth) // rows_per_depth
    in_reach = max_draft_tokens - num_tokens + 1
    fewest = torch.minimum(torch.minimum(max_drafts, until_end), has_room)
    return torch.minimum(fewest, in_reach).clamp(min=0)

"""How likely a sampled draft is kept, given which token the target went on to say.

The mean of these over tokens drawn from p is the acceptance that the two laws alone give
(`rejection_acceptance`, `coupled_acceptance`). Given the text, one costs no sum over the
vocabulary and the other no sort, and the steps through a whole text become independent.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rejection_given_text(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """P(the draft was kept | the target's token is x) = min(p_x, q_x) / p_x.  # [R]

    p, q       # [R, V] the target's law and the drafter's, over the same ids
    token_ids  # [R]
    """
    p_x, q_x = _of(p, token_ids), _of(q, token_ids)
    return torch.where(p_x > 0, (q_x / p_x).clamp(max=1.0), 0.0)


def coupled_given_text(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """P(the draft is x | the target's token is x) under shared Gumbel noise.  # [R]

    Both choose x with probability 1 / sum_y max(p_y/p_x, q_y/q_x); divided by p_x.
    """
    p_x, q_x = _of(p, token_ids), _of(q, token_ids)
    possible = (p_x > 0) & (q_x > 0)
    ratio = torch.where(possible, p_x / q_x, 0.0)
    rivals = torch.maximum(p, q * ratio.unsqueeze(1)).sum(1)
    return torch.where(possible, 1.0 / rivals, 0.0)


def _of(law: Tensor, token_ids: Tensor) -> Tensor:
    return law.gather(1, token_ids.unsqueeze(1)).squeeze(1)

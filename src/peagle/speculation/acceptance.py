"""How likely a sampled draft is accepted, by rejection and under shared Gumbel noise.

From the two distributions alone, or given which token the target sampled. The mean of the latter
over tokens drawn from p is the former. Given the text, one costs no sum over the vocabulary and the
other no sort, and the steps through a whole text become independent.

Shapes: R rows, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rejection_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rejection keeps a draft from q: sum of min(p, q).  # [..., V] -> [...]"""
    return torch.minimum(p, q).sum(-1)


def coupled_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that p and q sample the same token under shared Gumbel noise, float64.

    p, q  # [..., V] -> [...]

    Both sample x with probability 1 / sum_y max(p_y/p_x, q_y/q_x). With tokens in falling order
    of p/q the maximum is the p-ratio up to x and the q-ratio after it, so running sums replace
    the V^2 terms.
    """
    p, q = p.double(), q.double()
    order = (p / q).argsort(-1, descending=True)  # x/0 is first; 0/0 adds nothing wherever it is
    p, q = p.gather(-1, order), q.gather(-1, order)
    p_through = p.cumsum(-1)
    q_after = q.flip(-1).cumsum(-1).flip(-1) - q
    possible = (p > 0) & (q > 0)
    return torch.where(possible, p * q / (p_through * q + q_after * p), 0.0).sum(-1)


def rejection_given_text(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """P(the draft was kept | the target's token is x) = min(p_x, q_x) / p_x.  # [R]

    p, q       # [R, V] the target's distribution and the drafter's, over the same ids
    token_ids  # [R]
    """
    p_x, q_x = _of(p, token_ids), _of(q, token_ids)
    return torch.where(p_x > 0, (q_x / p_x).clamp(max=1.0), 0.0)


def coupled_given_text(p: Tensor, q: Tensor, token_ids: Tensor) -> Tensor:
    """P(the draft is x | the target's token is x) under shared Gumbel noise.  # [R]

    Both sample x with probability 1 / sum_y max(p_y/p_x, q_y/q_x); divided by p_x.
    """
    p_x, q_x = _of(p, token_ids), _of(q, token_ids)
    possible = (p_x > 0) & (q_x > 0)
    ratio = torch.where(possible, p_x / q_x, 0.0)
    rivals = torch.maximum(p, q * ratio.unsqueeze(1)).sum(1)
    return torch.where(possible, 1.0 / rivals, 0.0)


def _of(probs: Tensor, token_ids: Tensor) -> Tensor:
    return probs.gather(1, token_ids.unsqueeze(1)).squeeze(1)

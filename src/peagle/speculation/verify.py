"""Which draft tokens the target keeps. Neither rule can change the distribution of the output.

Shapes: B requests, K draft tokens at most, V tokens. A request may have fewer drafts than K:
what stands beyond `num_drafts` is padding and is never read as a draft.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PADDING = -1


class VerifyOutput(NamedTuple):
    """The first `num_accepted + 1` ids of a row are committed; the rest are PADDING."""

    num_accepted: Tensor  # [B] int64
    token_ids: Tensor  # [B, K+1] int64: accepted drafts, then the bonus token


def verify_coupled(target_tokens: Tensor, draft_tokens: Tensor, num_drafts: Tensor) -> VerifyOutput:
    """Keeps the drafts that are what the target itself samples, up to the first that is not.

    target_tokens  # [B, K+1] the target's token after each prefix of the drafts
    draft_tokens   # [B, K]
    num_drafts     # [B]

    Every committed token is the target's own, so where these depend on the prefix
    alone (argmax, or noise keyed by seed and position) the output is token for token the same
    with any drafter or none.
    """
    num_accepted = _leading(draft_tokens == target_tokens[:, :-1], num_drafts)  # [B]
    committed = _depths(target_tokens) <= num_accepted.unsqueeze(1)  # [B, K+1]
    return VerifyOutput(num_accepted, target_tokens.masked_fill(~committed, PADDING))


def verify_rejection(
    target_probs: Tensor,
    draft_probs: Tensor,
    draft_tokens: Tensor,
    num_drafts: Tensor,
    accept_uniforms: Tensor,
    residual_uniforms: Tensor,
) -> VerifyOutput:
    """Rejection sampling: keeps draft d with probability min(1, p(d) / q(d)); the first that
    falls is replaced by a draw from norm(max(p - q, 0)); if none falls, a draw from p follows.

    target_probs    # [B, K+1, V] p
    draft_probs     # [B, K, V] q, what each draft was really drawn from; one-hot for an argmax
    draft_tokens    # [B, K]
    num_drafts      # [B]
    accept_uniforms    # [B, K] uniforms in (0, 1)
    residual_uniforms  # [B, K+1] the same, for the replacement at each depth
    """
    p = _probs_of(target_probs[:, :-1], draft_tokens)  # [B, K]
    q = _probs_of(draft_probs, draft_tokens)  # [B, K]
    # uniform < p/q without the division; a draft that q rules out was not drawn from q.
    num_accepted = _leading((accept_uniforms * q < p) & (q > 0), num_drafts)  # [B]
    weights = _bonus_weights(target_probs, draft_probs, num_accepted, num_drafts)  # [B, V]
    uniforms = residual_uniforms.gather(1, num_accepted.unsqueeze(1))  # [B, 1]
    bonus = _draw(weights, uniforms)  # [B, 1]
    padded = torch.nn.functional.pad(draft_tokens, (0, 1), value=PADDING)  # [B, K+1]
    kept = _depths(padded) < num_accepted.unsqueeze(1)
    token_ids = padded.masked_fill(~kept, PADDING).scatter(1, num_accepted.unsqueeze(1), bonus)
    return VerifyOutput(num_accepted, token_ids)


def _leading(accepted: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts stand before the first that is not accepted.  # [B, K], [B] -> [B]"""
    drafted = _depths(accepted) < num_drafts.unsqueeze(1)
    return (accepted & drafted).long().cumprod(1).sum(1)


def _depths(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def _probs_of(probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token.  # [B, K, V], [B, K] -> [B, K]"""
    return probs.gather(2, tokens.clamp(min=0).unsqueeze(2)).squeeze(2)  # padding may be -1


def _bonus_weights(
    target_probs: Tensor, draft_probs: Tensor, num_accepted: Tensor, num_drafts: Tensor
) -> Tensor:
    """The bonus token's distribution, not normalised: max(p - q, 0) after a rejection, else p.

    p is the fallback too: where p equals q up to rounding, nothing may be left of p - q
    although a draft was rejected.  # [B, V] float64
    """
    rows = torch.arange(len(num_accepted), device=num_accepted.device)
    p = target_probs[rows, num_accepted].double()
    depth = draft_probs.shape[1]
    if depth == 0:
        return p
    q = draft_probs[rows, num_accepted.clamp(max=depth - 1)].double()
    rejected = (num_accepted < num_drafts).unsqueeze(1)
    residual = (p - q).clamp(min=0)
    usable = rejected & (residual.sum(1, keepdim=True) > 0)
    return torch.where(usable, residual, p)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF: the first token at which the running sum passes uniform * total.  # [B, 1]

    Only tokens with weight may be drawn, whatever a parallel sum rounds to.
    """
    running = torch.where(weights > 0, weights.cumsum(1), -1.0)  # [B, V]
    total = running.amax(1, keepdim=True)
    below_total = torch.nextafter(total, torch.zeros_like(total))  # uniform * total may round up
    passed = running > torch.minimum(uniforms * total, below_total)
    return passed.int().argmax(1, keepdim=True)

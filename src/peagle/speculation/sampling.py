"""From logits to a token, in vLLM's order: penalties, temperature, min-p, top-k, top-p, draw.

Every function treats each row alone: a row's result never depends on its neighbours.
Shapes: R rows, V tokens. Dropped tokens have the logit -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Nearly every nucleus ends within this many tokens; finding them is far quicker than a sort.
_NUCLEUS_CANDIDATES = 512


class SamplingRows(NamedTuple):
    """How each row of logits is sampled; the values that turn a filter off are given here."""

    temperature: Tensor  # [R] float32, above 0
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off


def apply_penalties(
    logits: Tensor,
    prompt_tokens_mask: Tensor,
    output_counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits with vLLM's three penalties applied, float32 [R, V].

    logits, prompt_tokens_mask (bool), output_counts (int)  # [R, V]
    repetition, presence, frequency                         # [R]

    Repetition concerns tokens of the prompt and of the output, the other two the output alone.
    """
    logits = logits.float()
    in_output = output_counts > 0
    seen = prompt_tokens_mask | in_output
    factor = repetition.unsqueeze(1)
    less_likely = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, less_likely, logits)
    return logits - frequency.unsqueeze(1) * output_counts - presence.unsqueeze(1) * in_output


def filter_logits(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Temperature, min-p, top-k and top-p, in this order, as vLLM; float32 [R, V].

    Min-p looks at the probabilities after temperature and before the other two; top-p looks at
    what top-k left, renormalised. The most likely token always stays. Rows must not be
    `nan_rows`. Which filters are on is read back from the device.
    """
    logits = logits.float() / rows.temperature.unsqueeze(1)
    if bool((rows.min_p > 0).any()):
        logits = _keep_min_p(logits, rows.min_p)
    if bool((rows.top_k > 0).any()):
        logits = _keep_top_k(logits, rows.top_k)
    with_top_p = (rows.top_p < 1).nonzero().squeeze(1)
    if len(with_top_p):
        kept = _keep_top_p(logits[with_top_p], rows.top_p[with_top_p])
        logits = logits.index_copy(0, with_top_p, kept)
    return logits


def probabilities(filtered_logits: Tensor) -> Tensor:
    """The distribution that `sample` draws from, float32 [R, V]."""
    return filtered_logits.float().softmax(-1)


def sample(filtered_logits: Tensor, noise: Tensor) -> Tensor:
    """One token per row, drawn from `probabilities` if `noise` is standard Gumbel.  # [R]

    A dropped token is never sampled: noise is finite. Normalising would not change the argmax;
    the maximum is taken off so that adding noise to large logits does not round it away.
    """
    peak = filtered_logits.amax(-1, keepdim=True)
    return greedy(filtered_logits - peak + noise)


def greedy(logits: Tensor) -> Tensor:
    """The most likely token per row; the lowest id among equals, as torch promises.  # [R]"""
    return logits.argmax(-1)


def nan_rows(logits: Tensor) -> Tensor:
    """Rows from which nothing can be sampled: NaN, +inf, or every token -inf.  # bool [R]"""
    peak = logits.amax(-1)  # NaN if any logit is
    return ~peak.isfinite()


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drops tokens less likely than min_p times the most likely one; 0 drops none."""
    threshold = logits.amax(1) + min_p.log()  # log 0 is -inf
    return logits.masked_fill(logits < threshold.unsqueeze(1), -torch.inf)


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Drops tokens below the k-th largest logit. Ties with it all stay, as in vLLM, so the
    result needs no order among equals and may keep more than k."""
    vocab_size = logits.shape[1]
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)  # [R]
    largest = torch.where(k < vocab_size, k, 1).amax()
    top = logits.topk(int(largest), dim=1).values  # [R, largest], falling
    threshold = top.gather(1, k.clamp(max=int(largest)).unsqueeze(1) - 1)
    return logits.masked_fill((logits < threshold) & (k < vocab_size).unsqueeze(1), -torch.inf)


def _keep_top_p(logits: Tensor, top_p: Tensor, candidates: int = _NUCLEUS_CANDIDATES) -> Tensor:
    """Keeps the fewest most likely tokens whose mass reaches top_p; the lowest ids among equals.

    Works on sorted values alone, then finds the tokens that have them: no order of the sort
    among equal values can show.
    """
    vocab_size = logits.shape[1]
    falling = logits.topk(min(candidates, vocab_size), dim=1).values  # [R, C]
    peak = falling[:, :1].double()
    # exp is five times slower at -inf; e^-100 is lost in a sum that holds e^0.
    total = (logits - peak).clamp(min=-100).exp().sum(1, keepdim=True)  # [R, 1]
    size = _nucleus_size((falling - peak).exp(), total, top_p)  # [R]
    kept = _keep_first(logits, falling, size)
    if candidates >= vocab_size:
        return kept
    wide = (size == candidates).nonzero().squeeze(1)  # rows whose nucleus may go on behind them
    if len(wide):
        kept = kept.index_copy(0, wide, _keep_top_p(logits[wide], top_p[wide], vocab_size))
    return kept


def _nucleus_size(weights: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    """How many leading tokens have less than top_p of the total before them; at least 1.  # [R]

    weights  # [R, C] falling, relative to the most likely token's

    In float64, so that a long running sum does not move the threshold.
    """
    before = weights.cumsum(1) - weights
    return (before < top_p.unsqueeze(1) * total).sum(1)


def _keep_first(logits: Tensor, falling: Tensor, size: Tensor) -> Tensor:
    """Keeps `size` tokens per row: all above the last kept value and the first equal to it."""
    last = falling.gather(1, size.unsqueeze(1) - 1)  # [R, 1]
    within = torch.arange(falling.shape[1], device=logits.device) < size.unsqueeze(1)
    num_equal = ((falling == last) & within).sum(1, keepdim=True)  # [R, 1]
    equal = logits == last
    kept = (logits > last) | (equal & (equal.cumsum(1) <= num_equal))
    return torch.where(kept, logits, -torch.inf)

"""Logit changes that depend on what a request has generated: bad words, minimum length,
bias, penalties.

Row j of a request is computed as if its first j drafts had been accepted, because only then is the
row used. Applied in vLLM's order, before temperature and the filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.request import Request
from peagle.speculation.sampling import apply_penalties


def needs_adjustment(request: Request) -> bool:
    p = request.params
    below_minimum = request.num_outputs < p.min_tokens
    return bool(request.bad_word_ids or below_minimum or p.logit_bias) or _has_penalties(request)


def adjust_logits(logits: Tensor, request: Request, drafts: Sequence[int]) -> Tensor:
    """logits [1 + len(drafts), V] of one request -> the same, adjusted; the input is kept."""
    logits = logits.clone()
    _ban_words(logits, request, drafts)
    _ban_early_stop(logits, request)
    for token_id, bias in request.params.logit_bias.items():
        logits[:, token_id] += bias
    return _penalise(logits, request, drafts) if _has_penalties(request) else logits


def _ban_words(logits: Tensor, request: Request, drafts: Sequence[int]) -> None:
    """A word's last token is banned where the tokens before it have just been generated."""
    if not request.bad_word_ids:
        return
    output_ids = request.output_token_ids + list(drafts)
    first = request.num_outputs
    for *prefix, last in request.bad_word_ids:
        for row in range(logits.shape[0]):
            end = first + row
            if output_ids[max(end - len(prefix), 0) : end] == prefix:
                logits[row, last] = -torch.inf


def _ban_early_stop(logits: Tensor, request: Request) -> None:
    rows_below = request.params.min_tokens - request.num_outputs
    if rows_below > 0 and request.stop_token_ids:
        logits[:rows_below, sorted(request.stop_token_ids)] = -torch.inf


def _has_penalties(request: Request) -> bool:
    p = request.params
    neutral = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    return not neutral


def _penalise(logits: Tensor, request: Request, drafts: Sequence[int]) -> Tensor:
    num_rows, vocab_size = logits.shape
    device = logits.device
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    in_prompt[request.prompt_token_ids] = True
    output_ids = torch.tensor(request.output_token_ids, dtype=torch.long, device=device)
    counts = torch.bincount(output_ids, minlength=vocab_size).repeat(num_rows, 1)  # [R, V]
    for row in range(1, num_rows):
        counts[row:, drafts[row - 1]] += 1
    p = request.params
    values = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    repetition, presence, frequency = (
        torch.full((num_rows,), value, device=device) for value in values
    )
    in_prompt = in_prompt.expand(num_rows, -1)
    return apply_penalties(logits, in_prompt, counts, repetition, presence, frequency)

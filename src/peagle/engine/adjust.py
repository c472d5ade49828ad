"""Logit changes that depend on what a request has generated: its grammar, bad words, minimum
length, bias, penalties.

A row of a request is computed as if the drafts before it had been accepted, because only then is
the row used. Applied in vLLM's order, before temperature and the filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.grammar import Grammar, apply_mask
from peagle.engine.request import Request
from peagle.speculation.sampling import apply_penalties


def needs_adjustment(request: Request) -> bool:
    p = request.params
    below_minimum = request.num_outputs < p.min_tokens
    changes = request.bad_word_ids or below_minimum or p.logit_bias or request.grammar is not None
    return bool(changes) or _has_penalties(request)


def adjust_logits(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    """logits [R, V] of one request, with the drafts before each of the R rows -> the same,
    adjusted; the input is kept."""
    logits = logits.clone() if request.grammar is None else _mask(logits, request.grammar, paths)
    _ban_words(logits, request, paths)
    _ban_early_stop(logits, request, paths)
    for token_id, bias in request.params.logit_bias.items():
        logits[:, token_id] += bias
    return _penalise(logits, request, paths) if _has_penalties(request) else logits


def _mask(logits: Tensor, grammar: Grammar, paths: Sequence[Sequence[int]]) -> Tensor:
    return apply_mask(logits, grammar.masks(paths))


def _ban_words(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    """A word's last token is banned where the tokens before it have just been generated."""
    if not request.bad_word_ids:
        return
    longest = max(len(word) for word in request.bad_word_ids)
    recent = request.output_token_ids[-longest:]
    banned = [
        (row, last)
        for row, path in enumerate(paths)
        for *prefix, last in request.bad_word_ids
        if _ends_with([*recent, *path], prefix)
    ]
    if banned:
        rows, tokens = zip(*banned, strict=True)
        logits[list(rows), list(tokens)] = -torch.inf


def _ends_with(token_ids: list[int], suffix: list[int]) -> bool:
    return not suffix or token_ids[-len(suffix) :] == suffix


def _ban_early_stop(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> None:
    missing = request.params.min_tokens - request.num_outputs
    rows = [row for row, path in enumerate(paths) if len(path) < missing]
    if rows and request.stop_token_ids:
        index = torch.tensor(rows, device=logits.device)
        ends = torch.tensor(sorted(request.stop_token_ids), device=logits.device)
        banned = logits[index].index_fill(1, ends, -torch.inf)
        if request.grammar is not None:  # where it is complete, nothing but the end is left
            is_complete = (banned == -torch.inf).all(1, keepdim=True)
            banned = torch.where(is_complete, logits[index], banned)
        logits[index] = banned


def _has_penalties(request: Request) -> bool:
    p = request.params
    neutral = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    return not neutral


def _penalise(logits: Tensor, request: Request, paths: Sequence[Sequence[int]]) -> Tensor:
    num_rows, vocab_size = logits.shape
    device = logits.device
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    in_prompt[request.prompt_token_ids] = True
    output_ids = torch.tensor(request.output_token_ids, dtype=torch.long, device=device)
    counts = torch.bincount(output_ids, minlength=vocab_size).repeat(num_rows, 1)  # [R, V]
    places = [(row, token) for row, path in enumerate(paths) for token in path]
    if places:  # in one operation: a tree has some hundred
        index = tuple(torch.tensor(column, device=device) for column in zip(*places, strict=True))
        counts.index_put_(index, counts.new_ones(len(places)), accumulate=True)
    p = request.params
    values = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    repetition, presence, frequency = (
        torch.full((num_rows,), value, device=device) for value in values
    )
    in_prompt = in_prompt.expand(num_rows, -1)
    return apply_penalties(logits, in_prompt, counts, repetition, presence, frequency)

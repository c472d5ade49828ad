"""Logits and drafts -> committed tokens. Draws drafts, too, with the noise that both share.

Row j of a request with k drafts decides output position `num_outputs + j`. Its noise depends on
the request's seed and on that position alone, so neither batch, step, preemption nor drafter can
change a sampled token (verification "coupled").

Shapes: B requests, R rows in all (1 + k each), V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peagle.config import Verification
from peagle.engine.adjust import adjust_logits, needs_adjustment
from peagle.engine.request import Request, TokenLogprobs
from peagle.models.drafter import SequenceDraft
from peagle.speculation.noise import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    gumbel_noise,
    stream_uniform,
)
from peagle.speculation.sampling import (
    SamplingRows,
    filter_logits,
    greedy,
    nan_rows,
    probabilities,
    sample,
)
from peagle.speculation.verify import PADDING, Verdict, verify_coupled, verify_rejection


class Judged(NamedTuple):
    """A request, its drafts, and the logits [1 + k, V] after each prefix of them."""

    request: Request
    draft: SequenceDraft
    logits: Tensor


class Committed(NamedTuple):
    """What one step adds to one request: accepted drafts, then the bonus token."""

    token_ids: list[int]
    num_accepted: int
    logprobs: list[TokenLogprobs]


def verify(batch: Sequence[Judged], verification: Verification) -> list[Committed | None]:
    """Judges the drafts of all requests of a step. None: its logits admit no token (NaN, or
    all are banned)."""
    adjusted = [_adjusted(j) for j in batch]
    broken = torch.stack([nan_rows(j.logits).any() for j in adjusted]).tolist() if batch else []
    results: list[Committed | None] = [None] * len(batch)
    for by_rejection in (False, True):
        chosen = [
            n
            for n, j in enumerate(batch)
            if not broken[n] and _uses_rejection(j.request, verification) == by_rejection
        ]
        if not chosen:
            continue
        judge = _judge_by_rejection if by_rejection else _judge_by_coupling
        judged = [adjusted[n] for n in chosen]
        for n, tokens, num_accepted in zip(chosen, *_to_host(judge(judged)), strict=True):
            results[n] = Committed(tokens, num_accepted, raw_logprobs(batch[n], tokens))
    return results


def row_settings(
    requests: Sequence[Request], counts: Sequence[int], device: torch.device
) -> SamplingRows:
    """The sampling parameters of each request, `counts` rows each."""
    params = [r.params for r, count in zip(requests, counts, strict=True) for _ in range(count)]
    return SamplingRows(
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], device=device),
        min_p=torch.tensor([p.min_p for p in params], device=device),
    )


def row_keys(
    requests: Sequence[Request], counts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Seed and output position of each row [R], for requests with `counts` rows each."""
    seeds: list[int] = []
    positions: list[int] = []
    for request, count in zip(requests, counts, strict=True):
        seeds += [request.seed] * count
        positions += range(request.num_outputs, request.num_outputs + count)
    return torch.tensor(seeds, device=device), torch.tensor(positions, device=device)


def raw_logprobs(judged: Judged, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the committed tokens before any adjustment, as vLLM reports them."""
    wanted = judged.request.params.logprobs
    if wanted is None:
        return []
    laws = judged.logits[: len(token_ids)].log_softmax(-1)  # [n, V]
    best = laws.topk(min(wanted, laws.shape[1]), dim=-1) if wanted else None
    out = []
    for row, token in enumerate(token_ids):
        chosen = laws[row, token]
        ids, values = [token], [chosen.item()]
        ranks = [int((laws[row] > chosen).sum()) + 1]
        if best is not None:
            ids += best.indices[row].tolist()
            values += best.values[row].tolist()
            ranks += range(1, len(best.indices[row]) + 1)
        out.append(TokenLogprobs(ids, values, ranks))
    return out


def _uses_rejection(request: Request, verification: Verification) -> bool:
    return verification == "rejection" and not request.params.greedy


def _adjusted(judged: Judged) -> Judged:
    if not needs_adjustment(judged.request):
        return judged
    drafts = judged.draft.token_ids
    return judged._replace(logits=adjust_logits(judged.logits, judged.request, drafts))


def _judge_by_coupling(batch: Sequence[Judged]) -> Verdict:
    best = greedy(torch.cat([j.logits for j in batch]))  # [R]
    choices = list(torch.split(best, [len(j.logits) for j in batch]))
    sampled = [n for n, j in enumerate(batch) if not j.request.params.greedy]
    if sampled:
        for n, tokens in zip(sampled, _sample([batch[n] for n in sampled]), strict=True):
            choices[n] = tokens
    target_tokens = pad_sequence(choices, batch_first=True, padding_value=PADDING)  # [B, K+1]
    drafts, num_drafts = _padded_drafts(batch)
    return verify_coupled(target_tokens, drafts, num_drafts)


def _sample(batch: Sequence[Judged]) -> tuple[Tensor, ...]:
    """The target's own choice after each prefix of the drafts; one tensor [1 + k] per request."""
    counts = [len(j.logits) for j in batch]
    filtered = _filtered(batch, counts)  # [R, V]
    seeds, positions = row_keys([j.request for j in batch], counts, filtered.device)
    noise = gumbel_noise(seeds, positions, filtered.shape[1])
    return torch.split(sample(filtered, noise), counts)


def _filtered(batch: Sequence[Judged], counts: Sequence[int]) -> Tensor:
    logits = torch.cat([j.logits for j in batch])
    return filter_logits(logits, row_settings([j.request for j in batch], counts, logits.device))


def _judge_by_rejection(batch: Sequence[Judged]) -> Verdict:
    counts = [len(j.logits) for j in batch]
    laws = probabilities(_filtered(batch, counts))
    target_probs = pad_sequence(list(torch.split(laws, counts)), batch_first=True)  # [B, K+1, V]
    drafts, num_drafts = _padded_drafts(batch)
    draft_probs = torch.zeros_like(target_probs[:, : drafts.shape[1]])  # [B, K, V]
    for n, j in enumerate(batch):
        draft_probs[n, : len(j.draft.token_ids)] = _draft_law(j)
    seeds, positions = row_keys([j.request for j in batch], [max(counts)] * len(batch), laws.device)
    shape = (len(batch), max(counts))
    accept = stream_uniform(seeds, positions, ACCEPT_STREAM).view(shape)[:, :-1]
    residual = stream_uniform(seeds, positions, RESIDUAL_STREAM).view(shape)
    judge = _rejection_for(laws.device)
    return judge(target_probs, draft_probs, drafts, num_drafts, accept, residual)


def _rejection_for(device: torch.device) -> Callable[..., Verdict]:
    if device.type != "cuda":
        return verify_rejection
    from peagle.kernels.gpu.rejection import verify_rejection as on_gpu

    return on_gpu


def _draft_law(judged: Judged) -> Tensor:
    """The law the drafts were drawn from [k, V]; a drafter that gives none is certain of them."""
    if judged.draft.probabilities is not None:
        return judged.draft.probabilities
    tokens = torch.tensor(judged.draft.token_ids, dtype=torch.long, device=judged.logits.device)
    return torch.nn.functional.one_hot(tokens, judged.logits.shape[1]).float()


def _padded_drafts(batch: Sequence[Judged]) -> tuple[Tensor, Tensor]:
    """Draft tokens [B, K] and how many of them are real [B]."""
    device = batch[0].logits.device
    tokens = [torch.tensor(j.draft.token_ids, dtype=torch.long) for j in batch]
    padded = pad_sequence(tokens, batch_first=True, padding_value=PADDING).to(device)
    return padded, torch.tensor([len(t) for t in tokens], device=device)


def _to_host(verdict: Verdict) -> tuple[list[list[int]], list[int]]:
    num_accepted = verdict.num_accepted.tolist()
    rows = verdict.token_ids.tolist()
    return [row[: n + 1] for row, n in zip(rows, num_accepted, strict=True)], num_accepted

"""One token per row of logits, greedy or sampled: the definition, built from `speculation`.

Reads back from the device which rows are sampled and which filters are on, so it cannot stand in
a CUDA graph; kernels/gpu/sampling.py can.

Shapes: R rows, V columns of logits. A reduced draft vocabulary gives `ids`: column c is token
ids[c] of the target. Noise, tokens and probabilities always speak of the target's ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import (
    SamplingRows,
    filter_logits,
    greedy,
    nan_rows,
    probabilities,
    sample,
)


class SamplingMetadata(NamedTuple):
    """How each row is sampled, as device tensors, with the values that turn a filter off."""

    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, output position that the row decides


class SampledTokens(NamedTuple):
    token_ids: Tensor  # [R] int64, the target's ids; 0 where the row is not usable
    usable: Tensor  # [R] bool, False where nothing can be sampled: NaN, +inf, or every logit -inf


class TokenProbs(NamedTuple):
    probs: Tensor  # [R, V] float32
    usable: Tensor  # [R] bool, as in SampledTokens


def sample_tokens(
    logits: Tensor,
    metadata: SamplingMetadata | None = None,
    ids: Tensor | None = None,
    *,
    filters: bool = True,
) -> SampledTokens:
    """The argmax of greedy rows (no metadata: all), the draw of the others.

    logits  # [R, V] float32, bfloat16 or float16
    ids     # [V]

    filters: False if no row has top-k, top-p or min-p on; they are not looked at then.
    """
    usable = ~nan_rows(logits)  # [R]
    columns = greedy(logits)  # [R]
    if metadata is not None:
        rows = _sampled_rows(metadata, usable)
        filtered, own = _filtered(logits, metadata, rows, filters)
        noise = gumbel_noise(own.seeds, own.positions, _noise_size(logits, ids))
        columns[rows] = sample(filtered, noise if ids is None else noise[:, ids])
    tokens = columns if ids is None else ids[columns]
    return SampledTokens(torch.where(usable, tokens, 0), usable)


def sampling_scores(
    logits: Tensor,
    metadata: SamplingMetadata | None,
    ids: Tensor | None,
    *,
    filters: bool = True,
) -> Tensor:
    """What `sample_tokens` takes the argmax of, float32 [R, V]: logits, or, of rows that are
    drawn, filtered logits with Gumbel noise. Undefined for rows that are not usable."""
    scores = logits.float()
    if metadata is None:
        return scores
    rows = _sampled_rows(metadata, ~nan_rows(logits))
    filtered, own = _filtered(logits, metadata, rows, filters)
    noise = gumbel_noise(own.seeds, own.positions, _noise_size(logits, ids))
    return scores.index_copy(0, rows, filtered + (noise if ids is None else noise[:, ids]))


def sample_with_probs(
    logits: Tensor,
    metadata: SamplingMetadata,
    ids: Tensor | None,
    probs: Tensor,
    *,
    filters: bool = True,
) -> SampledTokens:
    """`sample_tokens`, and the distribution that each token was drawn from, written into `probs`.

    probs  # float32 [R, V] over the target's ids; rows may lie apart in memory

    One-hot where nothing is drawn: greedy rows, and rows that are not usable (token 0).
    """
    sampled = sample_tokens(logits, metadata, ids, filters=filters)
    rows = _sampled_rows(metadata, sampled.usable)
    filtered, _ = _filtered(logits, metadata, rows, filters)
    columns = torch.arange(probs.shape[1], device=probs.device) if ids is None else ids
    drawn = probs.new_zeros(len(rows), probs.shape[1])
    probs.zero_().scatter_(1, sampled.token_ids.unsqueeze(1), 1.0)
    probs[rows] = drawn.index_copy(1, columns, probabilities(filtered))
    return sampled


def token_probs(logits: Tensor, metadata: SamplingMetadata, *, filters: bool = True) -> TokenProbs:
    """Each row's distribution, without drawing from it; one-hot as in `sample_with_probs`."""
    best, usable = sample_tokens(logits)
    rows = _sampled_rows(metadata, usable)
    filtered, _ = _filtered(logits, metadata, rows, filters)
    probs = torch.nn.functional.one_hot(best, logits.shape[1]).float()
    probs[rows] = probabilities(filtered)
    return TokenProbs(probs, usable)


def _sampled_rows(metadata: SamplingMetadata, usable: Tensor) -> Tensor:
    return ((metadata.temperature > 0) & usable).nonzero().squeeze(1)


def _filtered(
    logits: Tensor, metadata: SamplingMetadata, rows: Tensor, filters: bool
) -> tuple[Tensor, SamplingMetadata]:
    """Filtered logits and the metadata of `rows` alone."""
    own = SamplingMetadata(*(column[rows] for column in metadata))
    if not filters:
        return logits[rows].float() / own.temperature.unsqueeze(1), own
    if not len(rows):
        return logits[rows].float(), own
    return filter_logits(logits[rows], SamplingRows(*own[:4])), own


def _noise_size(logits: Tensor, ids: Tensor | None) -> int:
    return logits.shape[1] if ids is None else int(ids.max()) + 1

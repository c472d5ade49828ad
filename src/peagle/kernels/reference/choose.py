"""One token per row of logits, greedy or sampled: the definition, built from `speculation`.

Reads back from the device which rows are sampled and which filters are on, so it cannot stand in
a CUDA graph; kernels/gpu/choose.py can.

Shapes: R rows, V columns of logits. A reduced draft vocabulary gives `ids`: column c is token
ids[c] of the target. Noise, tokens and laws always speak of the target's ids.
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


class RowRules(NamedTuple):
    """How each row is chosen, as device tensors; the values that turn a rule off are given here."""

    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, output position that the row decides


class Chosen(NamedTuple):
    token_ids: Tensor  # [R] int64, the target's ids; 0 where the row is not usable
    usable: Tensor  # [R] bool, False where nothing can be chosen: NaN, +inf, or every logit -inf


class Laws(NamedTuple):
    probabilities: Tensor  # [R, V] float32
    usable: Tensor  # [R] bool, as in Chosen


def choose_tokens(
    logits: Tensor,
    rules: RowRules | None = None,
    ids: Tensor | None = None,
    *,
    filters: bool = True,
) -> Chosen:
    """The argmax of greedy rows (no rules: all), the draw of the others.

    logits  # [R, V] float32, bfloat16 or float16
    ids     # [V]

    filters: False if no row has top-k, top-p or min-p on; they are not looked at then.
    """
    usable = ~nan_rows(logits)  # [R]
    columns = greedy(logits)  # [R]
    if rules is not None:
        rows = _sampled_rows(rules, usable)
        filtered, own = _filtered(logits, rules, rows, filters)
        noise = gumbel_noise(own.seeds, own.positions, _noise_size(logits, ids))
        columns[rows] = sample(filtered, noise if ids is None else noise[:, ids])
    tokens = columns if ids is None else ids[columns]
    return Chosen(torch.where(usable, tokens, 0), usable)


def choose_with_laws(
    logits: Tensor, rules: RowRules, ids: Tensor | None, laws: Tensor, *, filters: bool = True
) -> Chosen:
    """`choose_tokens`, and the law that each token was drawn from, written into `laws`.

    laws  # float32 [R, V] over the target's ids; rows may lie apart in memory

    One-hot where nothing is drawn: greedy rows, and rows that are not usable (token 0).
    """
    chosen = choose_tokens(logits, rules, ids, filters=filters)
    rows = _sampled_rows(rules, chosen.usable)
    filtered, _ = _filtered(logits, rules, rows, filters)
    columns = torch.arange(laws.shape[1], device=laws.device) if ids is None else ids
    drawn = laws.new_zeros(len(rows), laws.shape[1])
    laws.zero_().scatter_(1, chosen.token_ids.unsqueeze(1), 1.0)
    laws[rows] = drawn.index_copy(1, columns, probabilities(filtered))
    return chosen


def token_laws(logits: Tensor, rules: RowRules, *, filters: bool = True) -> Laws:
    """The law of each row's token, without drawing one; one-hot as in `choose_with_laws`."""
    best, usable = choose_tokens(logits)
    rows = _sampled_rows(rules, usable)
    filtered, _ = _filtered(logits, rules, rows, filters)
    laws = torch.nn.functional.one_hot(best, logits.shape[1]).float()
    laws[rows] = probabilities(filtered)
    return Laws(laws, usable)


def _sampled_rows(rules: RowRules, usable: Tensor) -> Tensor:
    return ((rules.temperature > 0) & usable).nonzero().squeeze(1)


def _filtered(
    logits: Tensor, rules: RowRules, rows: Tensor, filters: bool
) -> tuple[Tensor, RowRules]:
    """Filtered logits and the rules of `rows` alone."""
    own = RowRules(*(rule[rows] for rule in rules))
    if not filters:
        return logits[rows].float() / own.temperature.unsqueeze(1), own
    if not len(rows):
        return logits[rows].float(), own
    return filter_logits(logits[rows], SamplingRows(*own[:4])), own


def _noise_size(logits: Tensor, ids: Tensor | None) -> int:
    return logits.shape[1] if ids is None else int(ids.max()) + 1

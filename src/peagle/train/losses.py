"""The loss over the rows that carry one, in chunks, without ever holding all logits.

The target's distribution for a row is computed from its last hidden state, chunk by chunk, next
to the draft logits. Each chunk's gradient is computed at once, so that only [C, H] stays for
backward: for C = 34K rows and V = 200K that is 0.3 GB where the logits would take 27.

Weighted by acceptance, a row counts for what it adds to the expected number of accepted drafts.
That depends on the other rows of its rollout, which lie in other chunks; but a row's gradient is
linear in its weight, so rows are weighed when all chunks are through.

Shapes: C loss rows, c of a chunk, H hidden size, V draft vocabulary, A anchors, K depths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.models.layers import at_least_float32

LossKind = Literal["kl", "ce", "tv"]
Weighting = Literal["depth", "acceptance"]
TV_SHARE = 0.9  # of `tv`; the rest is cross-entropy, which also learns where both are far apart


class Truth(NamedTuple):
    """What each loss row should predict."""

    states: Tensor  # [n, H]: the target's hidden states after its final norm
    slots: Tensor  # [C]: the state that the target predicts this row's token from
    labels: Tensor  # [C]: the token itself, as draft id


class Tables(NamedTuple):
    draft: Tensor  # [V, H]
    target: Tensor  # [V, H]: the rows of the target's output table that the drafter can propose


class Rollouts(NamedTuple):
    """Which drafts follow one another: C loss rows as elements (anchor, depth)."""

    anchor: Tensor  # [C], within 0 .. num_anchors - 1
    depth: Tensor  # [C]
    num_anchors: int
    num_depths: int

    def values(self, acceptance: Tensor, weights: Tensor, *, of_log: bool) -> Tensor:
        """[C]: dE / dp of each row, or dE / dlog p, where E = sum_k w_k p_0 ... p_k.

        With equal weights w, E is the expected number of accepted drafts of all rollouts.
        A row of weight 0 is padding, or a token that the drafter cannot propose: never accepted.
        """
        p, w = self._grid(torch.where(weights > 0, acceptance, 0.0)), self._grid(weights)
        reached = torch.ones_like(p)  # p_0 ... p_k-1: all drafts before this one are right
        reached[:, 1:] = p[:, :-1].cumprod(1)
        opened = w.clone()  # w_k + p_k+1 (w_k+1 + ...): what follows once this one is right
        for depth in reversed(range(self.num_depths - 1)):
            opened[:, depth] += p[:, depth + 1] * opened[:, depth + 1]
        slope = (reached * opened)[self.anchor, self.depth]
        return torch.where(weights > 0, slope * acceptance if of_log else slope, 0.0)

    def _grid(self, rows: Tensor) -> Tensor:
        """[A, K]: added up, for padding rows name an element too; theirs is 0."""
        grid = rows.new_zeros(self.num_anchors, self.num_depths)
        return grid.index_put_((self.anchor, self.depth), rows, accumulate=True)


class ChunkResult(NamedTuple):
    losses: Tensor  # [c], each times its weight
    logits_gradient: Tensor  # [c, V] of their sum
    acceptance: Tensor  # [c]: probability that the draft is accepted
    matches: Tensor  # [c] bool


ChunkFunction = Callable[[Tensor, Tensor, Tensor, Tensor], ChunkResult]


def kl_chunk(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> ChunkResult:
    """KL(target || draft) from logits [c, V], and whether both argmaxes are the same token."""
    log_q = F.log_softmax(at_least_float32(draft), dim=-1)
    log_p = F.log_softmax(at_least_float32(target), dim=-1)
    p = log_p.exp()
    losses = (p * (log_p - log_q)).sum(-1) * weights
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    gradient = ((log_q.exp() - p) * weights[:, None]).to(draft.dtype)
    return ChunkResult(losses, gradient, overlap, draft.argmax(-1) == target.argmax(-1))


def ce_chunk(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> ChunkResult:
    """Cross-entropy against the token that the target wrote, and whether the argmax is it."""
    log_q = F.log_softmax(at_least_float32(draft), dim=-1)
    is_label = torch.arange(draft.shape[-1], device=draft.device) == labels[:, None]
    of_label = torch.where(is_label, log_q, 0.0).sum(-1)
    gradient = ((log_q.exp() - is_label.to(log_q.dtype)) * weights[:, None]).to(draft.dtype)
    return ChunkResult(-of_label * weights, gradient, of_label.exp(), draft.argmax(-1) == labels)


def tv_chunk(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> ChunkResult:
    """TV_SHARE of the total variation between both distributions, the rest cross-entropy."""
    entropy = ce_chunk(draft, target, labels, (1 - TV_SHARE) * weights)
    q = at_least_float32(draft).softmax(-1)
    p = at_least_float32(target).softmax(-1)
    overlap = torch.minimum(p, q).sum(-1)  # 1 - total variation
    below = torch.where(q < p, q, 0.0)  # what the overlap takes of q: it grows with these alone
    gradient = below.sub_(q * below.sum(-1, keepdim=True)).mul_(-TV_SHARE * weights[:, None])
    losses = TV_SHARE * (1 - overlap) * weights + entropy.losses
    gradient = gradient.add_(entropy.logits_gradient).to(draft.dtype)
    return ChunkResult(losses, gradient, overlap, draft.argmax(-1) == target.argmax(-1))


CHUNKS: dict[LossKind, ChunkFunction] = {"kl": kl_chunk, "ce": ce_chunk, "tv": tv_chunk}


class LossOutput(NamedTuple):
    loss: Tensor  # [], sum of weight * divergence
    matches: Tensor  # [C] bool


class ChunkedLoss:
    """Chooses the divergence, the weighting and the chunk size once; compiled on GPU."""

    def __init__(
        self,
        kind: LossKind,
        chunk_rows: int,
        *,
        compiled: bool,
        weighting: Weighting = "depth",
        adjusted: Callable[[Tensor], Tensor] | None = None,  # logits, as the target changes them
    ) -> None:
        self.kind = kind
        self.weighting = weighting
        self.adjusted = adjusted
        self.chunk_rows = chunk_rows
        chunk = CHUNKS[kind]
        self._chunk = torch.compile(chunk, dynamic=False) if compiled else chunk

    def __call__(
        self, normed: Tensor, tables: Tables, truth: Truth, weights: Tensor, rollouts: Rollouts
    ) -> LossOutput:
        """normed [C, H]: states after the drafter's final norm; weights [C]: 0 for padding.

        The weights carry the shared denominator, so that sums over segments, micro-batches and
        processes need no further scaling.
        """
        normed = normed.to(tables.draft.dtype)
        outputs = _LinearLoss.apply(  # type: ignore[no-untyped-call]
            normed, tables.draft, self, tables, truth, weights, rollouts
        )
        return LossOutput(*outputs)

    def chunk(self, normed: Tensor, tables: Tables, truth: Truth, weights: Tensor) -> ChunkResult:
        draft = F.linear(normed, tables.draft)
        if self.kind == "ce":
            return self._chunk(draft, draft, truth.labels, weights)
        target = F.linear(truth.states[truth.slots].to(tables.target.dtype), tables.target)
        if self.adjusted is not None:
            target = self.adjusted(at_least_float32(target))
        return self._chunk(draft, target, truth.labels, weights)

    def sweep(
        self,
        normed: Tensor,
        tables: Tables,
        truth: Truth,
        weights: Tensor,
        table_gradient: Tensor | None,  # is added to
    ) -> Sweep:
        """All chunks, one after the other."""
        swept = Sweep(
            torch.empty_like(normed),
            torch.empty_like(weights),
            torch.empty_like(weights),
            torch.empty(len(normed), dtype=torch.bool, device=normed.device),
        )
        for start in range(0, len(normed), self.chunk_rows):
            part = slice(start, start + self.chunk_rows)
            here = truth._replace(slots=truth.slots[part], labels=truth.labels[part])
            result = self.chunk(normed[part], tables, here, weights[part])
            swept.losses[part] = result.losses
            swept.acceptance[part] = result.acceptance
            swept.matches[part] = result.matches
            torch.mm(result.logits_gradient, tables.draft, out=swept.gradient[part])
            if table_gradient is not None:
                table_gradient += result.logits_gradient.t() @ normed[part]
            del result  # its gradient would lie beside the next chunk's logits
        return swept


class Sweep(NamedTuple):
    gradient: Tensor  # [C, H]
    losses: Tensor  # [C]
    acceptance: Tensor  # [C]
    matches: Tensor  # [C] bool


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        table: Tensor,
        losses: ChunkedLoss,
        tables: Tables,
        truth: Truth,
        weights: Tensor,
        rollouts: Rollouts,
    ) -> tuple[Tensor, Tensor]:
        learn_table = ctx.needs_input_grad[1]
        table_gradient = torch.zeros_like(table, dtype=weights.dtype) if learn_table else None
        with torch.autocast(normed.device.type, enabled=False):
            if losses.weighting == "acceptance":
                unit = (weights > 0).to(weights.dtype)
                swept = losses.sweep(normed, tables, truth, unit, None)
                weights = rollouts.values(swept.acceptance, weights, of_log=losses.kind != "tv")
                if learn_table:  # its gradient is a sum over rows: they have to be weighed first
                    swept = losses.sweep(normed, tables, truth, weights, table_gradient)
                else:
                    swept.losses.mul_(weights)
                    swept.gradient.mul_(weights[:, None])
            else:
                swept = losses.sweep(normed, tables, truth, weights, table_gradient)
        ctx.save_for_backward(swept.gradient, table_gradient)
        ctx.mark_non_differentiable(swept.matches)
        return swept.losses.sum(), swept.matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normed_gradient, table_gradient = ctx.saved_tensors
        scale = gradients[0]
        table = None if table_gradient is None else table_gradient * scale
        return (
            normed_gradient * scale.to(normed_gradient.dtype),
            table,
            None,
            None,
            None,
            None,
            None,
        )

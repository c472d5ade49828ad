"""The loss over the rows that carry one, in chunks, without ever holding all logits.

The target's distribution for a row is computed from its last hidden state, chunk by chunk, next
to the draft logits. Each chunk's gradient is computed at once, so that only [C, H] stays for
backward: for C = 34K rows and V = 200K that is 0.3 GB where the logits would take 27.

Shapes: C loss rows, H hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.models.layers import at_least_float32

LossKind = Literal["kl", "ce"]


class Truth(NamedTuple):
    """What each loss row should predict."""

    states: Tensor  # [n, H]: the target's hidden states after its final norm
    slots: Tensor  # [C]: the state that the target predicts this row's token from
    labels: Tensor  # [C]: the token itself, as draft id


class Tables(NamedTuple):
    draft: Tensor  # [V, H]
    target: Tensor  # [V, H]: the rows of the target's output table that the drafter can propose


class ChunkResult(NamedTuple):
    loss: Tensor  # []
    logits_gradient: Tensor  # [c, V]
    matches: Tensor  # [c] bool


ChunkFunction = Callable[[Tensor, Tensor, Tensor, Tensor], ChunkResult]


def kl_chunk(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> ChunkResult:
    """KL(target || draft) from logits [c, V], and whether both argmaxes are the same token."""
    log_q = F.log_softmax(at_least_float32(draft), dim=-1)
    log_p = F.log_softmax(at_least_float32(target), dim=-1)
    p = log_p.exp()
    loss = ((p * (log_p - log_q)).sum(-1) * weights).sum()
    gradient = (log_q.exp() - p) * weights[:, None]
    return ChunkResult(loss, gradient.to(draft.dtype), draft.argmax(-1) == target.argmax(-1))


def ce_chunk(draft: Tensor, target: Tensor, labels: Tensor, weights: Tensor) -> ChunkResult:
    """Cross-entropy against the token that the target wrote, and whether the argmax is it."""
    log_q = F.log_softmax(at_least_float32(draft), dim=-1)
    is_label = torch.arange(draft.shape[-1], device=draft.device) == labels[:, None]
    loss = -(torch.where(is_label, log_q, 0.0).sum(-1) * weights).sum()
    gradient = (log_q.exp() - is_label.to(log_q.dtype)) * weights[:, None]
    return ChunkResult(loss, gradient.to(draft.dtype), draft.argmax(-1) == labels)


class LossOutput(NamedTuple):
    loss: Tensor  # [], sum of weight * divergence
    matches: Tensor  # [C] bool


class ChunkedLoss:
    """Chooses the divergence and the chunk size once; compiled on GPU."""

    def __init__(
        self,
        kind: LossKind,
        chunk_rows: int,
        *,
        compiled: bool,
        adjusted: Callable[[Tensor], Tensor] | None = None,  # logits, as the target changes them
    ) -> None:
        chunk: ChunkFunction = kl_chunk if kind == "kl" else ce_chunk
        self.kind = kind
        self.adjusted = adjusted
        self.chunk_rows = chunk_rows
        self._chunk = torch.compile(chunk, dynamic=False) if compiled else chunk

    def __call__(self, normed: Tensor, tables: Tables, truth: Truth, weights: Tensor) -> LossOutput:
        """normed [C, H]: states after the drafter's final norm; weights [C]: 0 for padding.

        The weights carry the shared denominator, so that sums over segments, micro-batches and
        processes need no further scaling.
        """
        normed = normed.to(tables.draft.dtype)
        outputs = _LinearLoss.apply(normed, tables.draft, self, tables, truth, weights)  # type: ignore[no-untyped-call]
        return LossOutput(*outputs)

    def chunk(self, normed: Tensor, tables: Tables, truth: Truth, weights: Tensor) -> ChunkResult:
        draft = F.linear(normed, tables.draft)
        if self.kind == "ce":
            return self._chunk(draft, draft, truth.labels, weights)
        target = F.linear(truth.states[truth.slots].to(tables.target.dtype), tables.target)
        if self.adjusted is not None:
            target = self.adjusted(at_least_float32(target))
        return self._chunk(draft, target, truth.labels, weights)


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
    ) -> tuple[Tensor, Tensor]:
        learn_table = ctx.needs_input_grad[1]
        gradient = torch.empty_like(normed)
        table_gradient = torch.zeros_like(table, dtype=weights.dtype) if learn_table else None
        loss = weights.new_zeros(())
        matches = torch.empty(len(normed), dtype=torch.bool, device=normed.device)
        with torch.autocast(normed.device.type, enabled=False):
            for start in range(0, len(normed), losses.chunk_rows):
                part = slice(start, start + losses.chunk_rows)
                here = truth._replace(slots=truth.slots[part], labels=truth.labels[part])
                result = losses.chunk(normed[part], tables, here, weights[part])
                loss += result.loss
                matches[part] = result.matches
                torch.mm(result.logits_gradient, table, out=gradient[part])
                if table_gradient is not None:
                    table_gradient += result.logits_gradient.t() @ normed[part]
                del result  # its gradient would lie beside the next chunk's logits
        ctx.save_for_backward(gradient, table_gradient)
        ctx.mark_non_differentiable(matches)
        return loss, matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normed_gradient, table_gradient = ctx.saved_tensors
        scale = gradients[0]
        table = None if table_gradient is None else table_gradient * scale
        return normed_gradient * scale.to(normed_gradient.dtype), table, None, None, None, None

"""Attention objects for training rows: a dense mask on CPU, FlexAttention on GPU.

Both state `may_attend`. FlexAttention also needs to know which blocks of 128 x 128 pairs can hold
a visible pair. Evaluating the predicate on all pairs to find out costs more than attending, so
blocks are classified by their extremes; inside a block that may be mixed the kernel asks the
predicate itself, so too generous a class costs time and never correctness.

Rows lie in the order that makes blocks pure: real rows of all documents first, then rollouts by
anchor. Anchors are slots of the packed row, so they rise from document to document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.models.attention import Attention, MaskedAttention
from peagle.models.masks import Elements, dense_mask, may_attend

BLOCK = 128

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attention_for(
    elements: Elements, positions: Tensor, windows: tuple[int | None, ...] = (None,)
) -> Attention:
    """The attention of these rows on the device they are on."""
    if elements.anchor.is_cuda:
        return FlexAttention(elements, positions, windows, compiled_flex_attention())
    return MaskedAttention(dense_mask(elements), positions)


class FlexAttention:
    """FlexAttention over the given rows; `windows` lists every sliding window that layers ask."""

    def __init__(
        self,
        elements: Elements,
        positions: Tensor,
        windows: tuple[int | None, ...] = (None,),
        flex: Callable[..., Any] = flex_attention,
    ) -> None:
        self.masks = {w: block_mask(elements, positions, w) for w in windows}
        self.flex = flex

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, N, D]
        options: dict[str, Any] = {"block_mask": self.masks[window], "enable_gqa": True}
        if scores.scale is not None:
            options["scale"] = scores.scale
        if scores.cap is not None:
            options["score_mod"] = capped(scores.cap)
        if scores.sinks is None:
            return self.flex(q, k, v, **options)[0].transpose(0, 1)  # type: ignore[no-any-return]
        out, lse = self.flex(q, k, v, **options, return_lse=True)  # [1, heads, N, D], [1, heads, N]
        # A softmax with one more term: what the keys' share of its denominator is.
        share = (lse - scores.sinks.to(lse.dtype)[:, None]).sigmoid()
        return (out * share[..., None].to(out.dtype))[0].transpose(0, 1)  # type: ignore[no-any-return]

    def with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """-> the output [N, heads, D] and the log of the softmax's denominator [N, heads]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = self.masks[window]
        out, lse = self.flex(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)


@functools.cache
def capped(cap: float) -> Callable[..., Tensor]:
    """One function per cap, so that one kernel is compiled for it."""

    def score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return cap * (score / cap).tanh()

    return score


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """On GPU FlexAttention is only a kernel when compiled. Shapes are padded, so one compile."""
    return torch.compile(flex_attention, dynamic=False)


def block_mask(elements: Elements, positions: Tensor, window: int | None = None) -> BlockMask:
    num_rows = len(elements.anchor)
    possible, certain = classify_blocks(elements, positions, window)
    partial_counts, partial_indices = _ordered(possible & ~certain)
    full_counts, full_indices = _ordered(certain)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=predicate(elements, positions, window),
        seq_lengths=(num_rows, num_rows),
    )


def predicate(elements: Elements, positions: Tensor, window: int | None = None) -> Predicate:
    """`may_attend` as FlexAttention asks it: for one pair of row numbers."""
    anchor, depth, document = elements

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query = Elements(anchor[q], depth[q], document[q])
        key = Elements(anchor[k], depth[k], document[k])
        return may_attend(query, key)

    if window is None:
        return visible
    size = positions.new_tensor(window)  # no constant: the same kernel for every window

    def visible_in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(b, h, q, k) & (positions[q] - positions[k] < size)

    return visible_in_window


class Extremes(NamedTuple):
    """The least and the greatest value of a field in each block of rows."""

    low: Tensor  # [blocks]
    high: Tensor  # [blocks]

    @classmethod
    def of(cls, field: Tensor) -> Extremes:
        missing = -len(field) % BLOCK
        blocks = torch.cat((field, field[-1:].expand(missing))).view(-1, BLOCK)
        return cls(*blocks.aminmax(dim=1))


def classify_blocks(
    elements: Elements, positions: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """[blocks, blocks] twice: may the pair of blocks hold a visible pair; must all be visible."""
    anchor, depth, document = (Extremes.of(field) for field in elements)
    documents_meet = _meet(document, document)
    key_has_real = (depth.low == 0)[None, :]
    key_before_query = anchor.low[None, :] <= anchor.high[:, None]
    rollouts_meet = _meet(anchor, anchor) & (depth.low[None, :] <= depth.high[:, None])
    possible = documents_meet & ((key_has_real & key_before_query) | rollouts_meet)

    one_document = (document.low == document.high)[:, None] & (document.low == document.high)
    key_all_real = (depth.high == 0)[None, :]
    key_all_before = anchor.high[None, :] <= anchor.low[:, None]
    certain = documents_meet & one_document & key_all_real & key_all_before
    if window is not None:
        position = Extremes.of(positions)
        possible = possible & (position.low[:, None] - position.high[None, :] < window)
        certain = certain & (position.high[:, None] - position.low[None, :] < window)
    if len(elements.anchor) % BLOCK:  # the last block holds rows that do not exist
        certain[:, -1] = False
        certain[-1, :] = False
    return possible, certain


def _meet(query: Extremes, key: Extremes) -> Tensor:
    """[blocks, blocks]: do the two ranges share a value?"""
    return (query.low[:, None] <= key.high[None, :]) & (key.low[None, :] <= query.high[:, None])


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """-> how many key blocks each query block visits [1, 1, Q], and those first [1, 1, Q, K]."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], indices.contiguous()[None, None]

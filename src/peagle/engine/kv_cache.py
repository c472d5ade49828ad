"""Paged keys and values, and attention over them.

Shapes: N rows, h heads, g key-value heads, D head dimension, T cached positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.kernels.cpu.layers import CachePlace
from peagle.kernels.cpu.ops import LANES, MAX_GROUP, LayerCache, PagedSpan, PagedStep, kernels_for
from peagle.kernels.reference.attention import PLAIN, Scores, attend
from peagle.models.attention import CachedAttention, layer_cache
from peagle.models.drafter import CacheLayout, Span

# Up to this many query rows the heads of a group are folded into the rows of one product.
MAX_FOLDED_ROWS = 17
# The kernel saves torch's 70 us of small operations per span and layer, but torch's products are
# denser: more multiply-adds than this per span on average, counted for one head of each group,
# and torch wins. Measured with 3 key-value heads of 64 on two cores.
MAX_KERNEL_WORK = 1_000_000


class PagedKVCache:
    """Keys and values of all layers; slot = block * block_size + offset.

    One slot more than the blocks have is padding: rows that only fill a batch are written there.
    """

    def __init__(
        self, layout: CacheLayout, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layout.num_layers, num_slots + 1, layout.num_kv_heads, layout.head_dim)
        # Not zeroed: the system hands out pages as they are first written.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._keys_address, self._values_address = self.keys.data_ptr(), self.values.data_ptr()
        self._layer_bytes = self.keys.stride(0) * dtype.itemsize

    @property
    def padding_slot(self) -> int:
        return self.keys.shape[1] - 1

    def addresses(self, layer: int) -> tuple[int, int]:
        """Where a layer's keys and values begin in memory."""
        offset = layer * self._layer_bytes
        return self._keys_address + offset, self._values_address + offset

    def attention(self, tables: Sequence[BlockTable], spans: Sequence[Span]) -> PagedAttention:
        return PagedAttention(self, tables, spans)


def slot_bytes(layout: CacheLayout, dtype: torch.dtype) -> int:
    return 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * dtype.itemsize


class PagedAttention(CachedAttention):
    """Attention for rows laid out as spans, one after the other.

    Each call writes the rows' keys and values to their slots, then lets each row see its own
    sequence up to and including itself. What stands behind, left by rejected drafts, is never
    read: a row is always written before a later row can see it.
    """

    def __init__(
        self, cache: PagedKVCache, tables: Sequence[BlockTable], spans: Sequence[Span]
    ) -> None:
        self.cache = cache
        self.tables = tables
        self.spans = spans
        positions = [s.start + depth for s in spans for depth in tree_depths(s)[s.first_row :]]
        self.positions = torch.tensor(positions, device=cache.keys.device)  # [N]
        kv_heads, dim = cache.keys.shape[-2:]
        work = sum(s.length * (s.start + s.length) for s in spans) * kv_heads * dim
        fits = cache.keys.dtype is torch.float32 and dim % LANES == 0
        self.prefers_kernel = fits and work <= MAX_KERNEL_WORK * len(spans)
        self._kernel_step: PagedStep | None = None

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        is_whole_row = k.shape[1:] == self.cache.keys.shape[-2:]
        fits = is_whole_row and scores.is_default and self._fits_kernel(q.shape[1])
        if fits and (kernels := kernels_for(q)):
            cache = LayerCache(*self.cache.addresses(layer), window)
            return kernels.paged_attention(q, k, v, cache, self._step(q.shape[1]))
        keys = layer_cache(self.cache.keys[layer], k)  # [S, g, D]
        values = layer_cache(self.cache.values[layer], v)
        keys.index_copy_(0, self._slots, k.to(keys.dtype))
        values.index_copy_(0, self._slots, v.to(values.dtype))
        if len(self.sequences) == 1:
            return self.sequences[0].attend(q, keys, values, window, scores)
        out = torch.empty_like(q)
        start = 0
        for view in self.sequences:
            rows = slice(start, start + view.length)
            out[rows] = view.attend(q[rows], keys, values, window, scores)
            start += view.length
        return out

    def kernel_place(self, heads: int) -> CachePlace | None:
        if not self._fits_kernel(heads):
            return None
        layer_size = self.cache.keys.stride(0)
        return CachePlace(*self.cache.addresses(0), layer_size, self._step(heads))

    def prefixes(self, x: Tensor) -> list[tuple[Tensor, int]]:
        rows = self.cache.keys[0].flatten(1)  # [S, H]
        rows.index_copy_(0, self._slots, x.to(rows.dtype))
        return [(rows[view.gather], view.length) for view in self.sequences]

    def _fits_kernel(self, heads: int) -> bool:
        return self.prefers_kernel and heads <= MAX_GROUP * self.cache.keys.shape[-2]

    @cached_property
    def sequences(self) -> list[_SequenceView]:
        device = self.cache.keys.device
        return [_SequenceView(self.tables[s.sequence], s, device) for s in self.spans]

    @cached_property
    def _slots(self) -> Tensor:
        """Where each row is written: [N]."""
        return torch.cat([view.write_slots for view in self.sequences]).to(self.positions.device)

    def _step(self, heads: int) -> PagedStep:
        """The spans as the kernel reads them; the same for all layers."""
        if self._kernel_step is None:
            tables = [self.tables[s.sequence] for s in self.spans]
            spans = [
                PagedSpan(s.start, s.length, t.blocks, s.parents, s.first_row)
                for s, t in zip(self.spans, tables, strict=True)
            ]
            kv_heads, dim = self.cache.keys.shape[-2:]
            self._kernel_step = PagedStep(spans, tables[0].block_size, heads, kv_heads, dim)
        return self._kernel_step


class _SequenceView:
    """One span of one sequence: where its cache lies and which of it each row may see."""

    def __init__(self, table: BlockTable, span: Span, device: torch.device) -> None:
        self.span, self.start, self.length = span, span.start, span.length
        self.end = span.start + span.first_row + span.length
        slots = _slots(table, self.end)  # [T]
        self.write_slots = slots[self.end - span.length :]
        first = table.slot(0)
        # The fast path and its reference: a slice of the cache, or a gather from it.
        self.extent = slice(first, first + self.end) if table.contiguous else None
        self.gather = slots.to(device)
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self.device = device

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, scores: Scores
    ) -> Tensor:
        """q [n, h, D] over the cache [S, g, D] -> [n, h, D]."""
        if self.extent is not None:
            k, v = keys[self.extent], values[self.extent]  # [T, g, D]
        else:
            k, v = keys[self.gather], values[self.gather]
        if not scores.is_softmax:
            return attend(q, k, v, self._visible(window), scores)
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, g, T, D]
        if self.length <= MAX_FOLDED_ROWS:
            return self._attend_folded(q, k, v, window, scores.scale)
        return self._attend_long(q, k, v, window, scores.scale)

    def _attend_folded(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """The heads that share a key-value head become further rows: no key is repeated."""
        n, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        rows = q.view(n, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(1, kv_heads, -1, dim)
        mask = self._mask(window, group, q.dtype)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        return out.view(kv_heads, n, group, dim).permute(1, 0, 2, 3).reshape(n, heads, dim)

    def _attend_long(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        rows = q.transpose(0, 1)[None]  # [1, h, n, D]
        whole_prompt = self.start == 0 and window is None and self.span.parents is None
        mask = None if whole_prompt else self._mask(window, 1, q.dtype)
        out = F.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, is_causal=whole_prompt, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [n * group, T], made once per step; None where all is seen."""
        is_alone = self.length == 1 and not self.span.first_row
        sees_all = is_alone and (window is None or self.end <= window)
        if sees_all:
            return None
        if (window, group) not in self._masks:
            visible = self._visible(window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
            mask.masked_fill_(~visible, -torch.inf)
            self._masks[window, group] = mask.repeat_interleave(group, dim=0)
        return self._masks[window, group]

    def _visible(self, window: int | None) -> Tensor:
        """[n, T]"""
        rows = torch.arange(self.end - self.length, self.end, device=self.device)
        key = torch.arange(self.end, device=self.device)
        visible = key <= rows[:, None]
        if self.span.parents is not None:
            visible[:, self.start :] = self._ancestors()
        if window is not None:
            depths = torch.tensor(tree_depths(self.span), device=self.device)
            key[self.start :] = self.start + depths  # the tree's rows, with those before these
            visible &= key[-self.length :, None] - key < window
        return visible

    def _ancestors(self) -> Tensor:
        """Which rows of its tree each row of the span sees: [n, first_row + n]."""
        size = self.end - self.start
        sees = torch.eye(size, dtype=torch.bool, device=self.device)
        for row, parent in enumerate(self.span.parents or (), start=1):
            sees[row] |= sees[parent]
        return sees[-self.length :]


def tree_depths(span: Span) -> list[int]:
    """How far behind `start` each row of the tree stands, from its row 0 on."""
    if span.parents is None:
        return list(range(span.length))
    depths = [0]
    for parent in span.parents:
        depths.append(depths[parent] + 1)
    return depths


def _slots(table: BlockTable, length: int) -> Tensor:
    """Slots of positions 0 .. length-1."""
    if table.contiguous:
        first = table.slot(0)
        return torch.arange(first, first + length)
    blocks = torch.tensor(table.blocks)
    positions = torch.arange(length)
    return blocks[positions // table.block_size] * table.block_size + positions % table.block_size

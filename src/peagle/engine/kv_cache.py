"""Paged keys and values, and attention over them.

Shapes: N rows, h heads, g key-value heads, D head dimension, T cached positions of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.layer_groups import LayerPlace, one_table
from peagle.kernels.cpu.layers import CacheLayers, CachePlace
from peagle.kernels.cpu.ops import LANES, MAX_GROUP, LayerCache, PagedSpan, PagedStep, kernels_for
from peagle.kernels.reference.attention import PLAIN, Scores, attend
from peagle.models.attention import CachedAttention, layer_cache
from peagle.models.drafter import CacheLayout, Span

# Up to this many query rows the heads of a group are folded into the rows of one product.
MAX_FOLDED_ROWS = 17


class PagedKVCache:
    """Keys and values of all layers; slot = block * block_size + offset.

    One slot more than the blocks have is padding: rows that only fill a batch are written there.
    `places`: where each layer lies; as a rule in a plane of its own, by one block table for all.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Sequence[LayerPlace] = (),
        num_planes: int | None = None,  # None: one for each layer
    ) -> None:
        planes = layout.num_layers if num_planes is None else num_planes
        shape = (planes, num_slots + 1, layout.num_kv_heads, layout.head_dim)
        # Not zeroed: the system hands out pages as they are first written.
        self.keys = torch.empty(shape, dtype=dtype, device=device)  # [planes, S, g, D]
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._place(tuple(places) or one_table(layout.num_layers))

    def shared_with(self, layout: CacheLayout, places: Sequence[LayerPlace]) -> PagedKVCache:
        """The same memory for another model's layers, whose rows may be narrower."""
        cache = object.__new__(PagedKVCache)
        size = layout.num_kv_heads, layout.head_dim
        rows = slice(0, layout.row_size)
        cache.keys, cache.values = (
            x.flatten(-2)[..., rows].view(*x.shape[:2], *size) for x in (self.keys, self.values)
        )
        cache._place(tuple(places))
        return cache

    def _place(self, places: tuple[LayerPlace, ...]) -> None:
        self.places = places  # by layer
        self.layers = CacheLayers(
            [self.keys[place.plane].data_ptr() for place in places],
            [self.values[place.plane].data_ptr() for place in places],
            [place.table for place in places],
        )

    @property
    def padding_slot(self) -> int:
        return self.keys.shape[1] - 1

    @property
    def has_whole_rows(self) -> bool:
        """Whether a slot's row is followed by the next slot's."""
        return self.keys.is_contiguous()

    @cached_property
    def planes_by_table(self) -> dict[int, slice]:
        """Which planes of each table's blocks are this model's: they follow each other."""
        planes: dict[int, list[int]] = {}
        for table, plane in self.places:
            planes.setdefault(table, []).append(plane)
        return {table: slice(min(own), max(own) + 1) for table, own in planes.items()}

    def attention(self, tables: Sequence[BlockTable], spans: Sequence[Span]) -> PagedAttention:
        return PagedAttention(self, tables, spans)


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
        self._steps: dict[int, PagedStep] = {}  # by table
        self._rows: dict[int, _TableRows] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        table, plane = self.cache.places[layer]
        is_whole_row = k.shape[1:] == self.cache.keys.shape[-2:]
        fits = is_whole_row and scores.is_default and self._fits_kernel(q.shape[1])
        if fits and (kernels := kernels_for(q)):
            cache = LayerCache(*self.cache.layers.addresses(layer), window)
            return kernels.paged_attention(q, k, v, cache, self._step(table, q.shape[1]))
        keys = layer_cache(self.cache.keys[plane], k)  # [S, g, D]
        values = layer_cache(self.cache.values[plane], v)
        sequences, slots = self.rows(table)
        keys.index_copy_(0, slots, k.to(keys.dtype))
        values.index_copy_(0, slots, v.to(values.dtype))
        if len(sequences) == 1:
            return sequences[0].attend(q, keys, values, window, scores)
        out = torch.empty_like(q)
        start = 0
        for view in sequences:
            rows = slice(start, start + view.length)
            out[rows] = view.attend(q[rows], keys, values, window, scores)
            start += view.length
        return out

    def kernel_place(self, heads: int) -> CachePlace | None:
        if not self._fits_kernel(heads):
            return None
        tables = range(max(self.cache.planes_by_table) + 1)
        steps = [self._step(table, heads) for table in tables]
        return CachePlace(self.cache.layers, steps)

    def prefixes(self, x: Tensor) -> list[tuple[Tensor, int]]:
        rows, (sequences, slots) = self.cache.keys[0].flatten(1), self.rows(0)  # [S, H]
        rows.index_copy_(0, slots, x.to(rows.dtype))
        return [(rows[view.gather], view.length) for view in sequences]

    def rows(self, table: int) -> _TableRows:
        """The spans' places by one of the sequences' tables; the same for all its layers."""
        if table not in self._rows:
            device = self.cache.keys.device
            views = [
                _SequenceView(self.tables[s.sequence].groups[table], s, device) for s in self.spans
            ]
            slots = torch.cat([view.write_slots for view in views]).to(self.positions.device)
            self._rows[table] = _TableRows(views, slots)
        return self._rows[table]

    def _fits_kernel(self, heads: int) -> bool:
        cache, (kv_heads, dim) = self.cache, self.cache.keys.shape[-2:]
        is_whole = cache.has_whole_rows and dim % LANES == 0
        return is_whole and cache.keys.dtype is torch.float32 and heads <= MAX_GROUP * kv_heads

    def _step(self, table: int, heads: int) -> PagedStep:
        """The spans as the kernel reads them."""
        if table not in self._steps:
            tables = [self.tables[s.sequence].groups[table] for s in self.spans]
            spans = [
                PagedSpan(s.start, s.length, t.blocks, s.parents, s.first_row)
                for s, t in zip(self.spans, tables, strict=True)
            ]
            kv_heads, dim = self.cache.keys.shape[-2:]
            self._steps[table] = PagedStep(spans, tables[0].block_size, heads, kv_heads, dim)
        return self._steps[table]


class _TableRows(NamedTuple):
    sequences: list[_SequenceView]
    slots: Tensor  # [N] where each row is written


class _SequenceView:
    """One span of one sequence: where its cache lies and which of it each row may see.

    `base`: the first position that is cached; what stands before it, a window has passed. T counts
    from there on.
    """

    def __init__(self, table: BlockTable, span: Span, device: torch.device) -> None:
        self.span, self.start, self.length = span, span.start, span.length
        self.end = span.start + span.first_row + span.length
        self.base = table.num_passed * table.block_size
        slots = _slots(table, self.base, self.end)  # [T]
        self.write_slots = slots[self.end - span.length - self.base :]
        # The fast path and its reference: a slice of the cache, or a gather from it.
        first, count = table.slot(self.base), self.end - self.base
        self.extent = slice(first, first + count) if table.contiguous else None
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
        sees_all = is_alone and (window is None or self.end - self.base <= window)
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
        key = torch.arange(self.base, self.end, device=self.device)
        visible = key <= rows[:, None]
        if self.span.parents is not None:
            visible[:, self.start - self.base :] = self._ancestors()
        if window is not None:
            depths = torch.tensor(tree_depths(self.span), device=self.device)
            # The tree's rows, with those before these.
            key[self.start - self.base :] = self.start + depths
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


def _slots(table: BlockTable, base: int, end: int) -> Tensor:
    """Slots of positions base .. end-1."""
    if table.contiguous:
        first = table.slot(base)
        return torch.arange(first, first + end - base)
    blocks = torch.tensor(table.blocks)
    positions = torch.arange(base, end)
    return blocks[positions // table.block_size] * table.block_size + positions % table.block_size

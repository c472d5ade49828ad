"""How the rows of a pass are laid out: exactly, or padded to shapes that a CUDA graph can hold.

Where the host knows each request's position (a CPU collects every step at once), rows that are
not real are left out and attention reads the cache by spans. Under graphs positions are known to
the device alone: every item has all its rows, or all items share a number of them, and those beyond
an item's count go to the padding slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.rows import PagedRows, RowGroups
from peagle.kernels.step_ops import StepOps
from peagle.models.attention import RowsAttention
from peagle.models.drafter import Packing, RowItems, Rows, Span, pack


class PagedModel(NamedTuple):
    """A model's cache and the last position that its rotary table has."""

    cache: PagedKVCache
    max_position: int


class RowLayout(Protocol):
    def rows(self, model: PagedModel, items: Sequence[RowItems], num_splits: int) -> Rows:
        """The rows of all items, one group of items behind the other."""
        ...

    def pack(self, counts: Tensor, rows_per_item: int) -> Packing: ...

    def pack_depths(self, num_drafts: Tensor, first: int, count: int) -> Packing:
        """Rows of drafts first .. first + count - 1, of slots with so many drafts."""
        ...

    def max_drafts(self, num_drafts: Tensor, most: int) -> int:
        """Draft tokens per slot that tensors have room for."""
        ...


class ExactLayout:
    """`tables`: by slot, the block table of the request in it."""

    def __init__(self, tables: Sequence[BlockTable | None]) -> None:
        self.tables = tables

    def rows(self, model: PagedModel, items: Sequence[RowItems], num_splits: int) -> Rows:
        tables: list[BlockTable] = []
        spans: list[Span] = []
        index: list[int] = []
        first = 0
        for group in items:
            columns = (group.slots.tolist(), group.starts.tolist(), group.counts.tolist())
            parents = None if group.tree is None else group.tree.parents.tolist()
            for n, (slot, start, count) in enumerate(zip(*columns, strict=True)):
                if count:
                    table = self.tables[slot]
                    assert table is not None
                    last = group.first_row + count - 1
                    own = None if parents is None else parents[n][:last]
                    spans.append(Span(len(tables), start, count, own, group.first_row))
                    tables.append(table)
                    index += range(first, first + count)
                first += group.rows_per_item
        attention = model.cache.attention(tables, spans)
        positions = attention.positions
        if len(index) == first:
            return Rows(attention, positions, Packing(first))
        real = torch.tensor(index, dtype=torch.long, device=positions.device)
        return Rows(attention, positions, Packing(first, real))

    def pack(self, counts: Tensor, rows_per_item: int) -> Packing:
        return pack(counts.tolist(), rows_per_item, counts.device)

    def pack_depths(self, num_drafts: Tensor, first: int, count: int) -> Packing:
        return self.pack((num_drafts - first).clamp(0, count), count)

    def max_drafts(self, num_drafts: Tensor, most: int) -> int:
        return min(int(num_drafts.max()), most) if len(num_drafts) else 0


class PaddedLayout:
    """`block_tables`  # [G, L, M]: those of DeviceBatch"""

    def __init__(self, ops: StepOps, block_tables: Tensor, block_size: int) -> None:
        self.ops, self.block_tables, self.block_size = ops, block_tables, block_size

    def rows(self, model: PagedModel, items: Sequence[RowItems], num_splits: int) -> Rows:
        counts = [_num_rows(group) for group in items]
        # All begin at multiples of 16 bytes, even of a single row: Triton compiles another form of
        # a kernel where a pointer does not, and one row is to have the bits it has among several.
        total, cache = sum(counts), model.cache
        shape = 1 + len(cache.planes_by_table), total + total % 2
        device = self.block_tables.device
        places = torch.empty(shape, dtype=torch.int64, device=device)[:, :total]
        by_table: dict[int, RowGroups] = {}
        for table, slots in zip(cache.planes_by_table, places[1:], strict=True):
            groups: list[PagedRows] = []
            parts = torch.split(places[0], counts), torch.split(slots, counts)
            for group, *part in zip(items, *parts, strict=True):
                # Items beyond the first group are prompts: many rows, which keep the device busy.
                splits = 1 if groups else num_splits
                groups.append(self._group(model, table, group, splits, *part))
            by_table[table] = RowGroups(places[0], slots, groups)
        attention = RowsAttention(
            [by_table[place.table] for place in cache.places],
            [cache.keys[place.plane] for place in cache.places],
            [cache.values[place.plane] for place in cache.places],
        )
        return Rows(attention, places[0], Packing(total))

    def _group(
        self,
        model: PagedModel,
        table: int,
        group: RowItems,
        num_splits: int,
        positions: Tensor,
        slots: Tensor,
    ) -> PagedRows:
        block_tables = self.block_tables[table]
        row_starts = None if group.shared is None else group.shared.starts
        plan = self.ops.plan_rows(
            block_tables,
            group.slots,
            group.starts,
            group.counts,
            group.rows_per_item,
            self.block_size,
            model.cache.padding_slot,
            model.max_position,
            positions,
            slots,
            None if group.tree is None else group.tree.depths,
            group.first_row,
            row_starts,
        )
        return PagedRows(
            block_tables=block_tables,
            tables=plan.tables,
            starts=plan.starts,
            ends=plan.ends,
            positions=positions,
            slots=slots,
            rows_per_item=group.rows_per_item,
            block_size=self.block_size,
            num_splits=num_splits,
            ancestors=None if group.tree is None else group.tree.ancestors.flatten(),
            first_row=group.first_row,
            row_starts=row_starts,
        )

    def pack(self, counts: Tensor, rows_per_item: int) -> Packing:
        return Packing(len(counts) * rows_per_item, None, rows_per_item)

    def pack_depths(self, num_drafts: Tensor, first: int, count: int) -> Packing:
        return self.pack(num_drafts, count)

    def max_drafts(self, num_drafts: Tensor, most: int) -> int:
        return most


def _num_rows(group: RowItems) -> int:
    if group.shared is not None:
        return len(group.shared.places)
    return len(group.slots) * group.rows_per_item

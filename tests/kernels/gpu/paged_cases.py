"""Random paged caches with items that read them, and attention by its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.rows import PagedRows
from tests.tolerance import near

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Each shape is compiled anew on a GPU, and is only interpreted elsewhere.
EXAMPLES = 10 if DEVICE.type == "cuda" else 8
TOLERANCE = {
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
    torch.float32: near(terms=160),
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1e-2, "rtol": 2e-2},
}


# Of projections that are rotated and written to a cache.
NUM_POSITIONS, EPS = 40, 1e-5
UNTOUCHED = 7.0


@dataclass(frozen=True)
class Heads:
    q: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Item:
    start: int
    end: int


@dataclass(frozen=True)
class Shape:
    items: tuple[Item, ...]
    rows_per_item: int
    group: int = 1
    kv_heads: int = 1
    dim: int = 8
    block_size: int = 4
    num_splits: int = 1


@dataclass(frozen=True)
class Case:
    q: Tensor
    keys: Tensor
    values: Tensor
    rows: PagedRows


@st.composite
def shapes(draw: st.DrawFn, capacity: int = 160) -> Shape:
    rows = draw(st.integers(1, 5))
    starts = st.integers(0, capacity - 1)
    items = []
    for start in draw(st.lists(starts, min_size=1, max_size=3)):
        only_pads = draw(st.booleans()) and draw(st.booleans())
        # Beyond the item's own rows too: those of a later item of the same sequence.
        end = draw(st.integers(start + 1, min(start + rows + 3, capacity)))
        items.append(Item(start, 0 if only_pads else end))
    return Shape(
        tuple(items),
        rows,
        group=draw(st.integers(1, 4)),
        kv_heads=draw(st.integers(1, 2)),
        dim=draw(st.sampled_from([8, 16, 64])),
        block_size=draw(st.sampled_from([4, 16])),
        num_splits=draw(st.integers(1, 4)),
    )


def make_case(shape: Shape, dtype: torch.dtype, seed: int = 0, capacity: int = 160) -> Case:
    """Each item has a block table of its own. What no item may read is NaN."""
    draws = torch.Generator().manual_seed(seed)
    num_items, width = len(shape.items), -(-capacity // shape.block_size)
    order = torch.randperm(num_items * width, generator=draws).view(num_items, width)
    padding = num_items * width  # the last block
    cache_shape = ((padding + 1) * shape.block_size, shape.kv_heads, shape.dim)
    keys, values = (torch.full(cache_shape, torch.nan) for _ in range(2))
    block_tables = torch.full((num_items, width), padding)
    tables = torch.randperm(num_items, generator=draws)
    for item, table in zip(shape.items, tables.tolist(), strict=True):
        held = -(-item.end // shape.block_size)
        block_tables[table, :held] = order[table, :held]
        for cache in keys, values:
            cache[_slots(order[table], item.end, shape.block_size)] = torch.randn(
                item.end, *cache_shape[1:], generator=draws
            )
    heads = shape.kv_heads * shape.group
    q = torch.randn(num_items * shape.rows_per_item, heads, shape.dim, generator=draws)
    rows = make_rows(shape, block_tables, tables)
    return Case(*(t.to(DEVICE, dtype) for t in (q, keys, values)), rows)


def make_rows(shape: Shape, block_tables: Tensor, tables: Tensor, **changes: Any) -> PagedRows:
    num_rows = len(shape.items) * shape.rows_per_item
    rows = PagedRows(
        block_tables=block_tables.int().to(DEVICE),
        tables=tables.int().to(DEVICE),
        starts=torch.tensor([i.start for i in shape.items]).int().to(DEVICE),
        ends=torch.tensor([i.end for i in shape.items]).int().to(DEVICE),
        positions=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        slots=torch.zeros(num_rows, dtype=torch.int64, device=DEVICE),
        rows_per_item=shape.rows_per_item,
        block_size=shape.block_size,
        num_splits=shape.num_splits,
    )
    return rows._replace(**changes)


def _slots(blocks: Tensor, length: int, block_size: int) -> Tensor:
    positions = torch.arange(length)
    return blocks[positions // block_size] * block_size + positions % block_size


def attention_by_definition(case: Case, window: int | None) -> Tensor:
    """One row, head and key at a time."""
    rows, out = case.rows, torch.zeros_like(case.q)
    group = case.q.shape[1] // case.keys.shape[1]
    for item, table in enumerate(rows.tables.tolist()):
        blocks = rows.block_tables[table].tolist()
        for j in range(rows.rows_per_item):
            seen = _seen(rows, item, j, window)
            slots = [
                blocks[p // rows.block_size] * rows.block_size + p % rows.block_size for p in seen
            ]
            for head in range(case.q.shape[1]):
                out[item * rows.rows_per_item + j, head] = _attend_one(
                    case.q[item * rows.rows_per_item + j, head],
                    [case.keys[slot, head // group] for slot in slots],
                    [case.values[slot, head // group] for slot in slots],
                )
    return out


def _seen(rows: PagedRows, item: int, j: int, window: int | None) -> list[int]:
    """Places in the sequence of the keys that row j sees."""
    start, end = int(rows.starts[item]), int(rows.ends[item])
    if rows.ancestors is None:
        first = 0 if window is None else max(0, start + j - window + 1)
        return list(range(first, min(start + j + 1, end)))
    row = item * rows.rows_per_item + j
    first = 0 if window is None else max(0, int(rows.positions[row]) - window + 1)
    own = [n for n in range(64) if int(rows.ancestors[row]) >> n & 1]
    own = [n for n in own if int(rows.positions[item * rows.rows_per_item + n]) >= first]
    return [p for p in [*range(first, start), *(start + n for n in own)] if p < end]


def _attend_one(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if not keys:
        return torch.zeros_like(q)
    weights = [torch.exp((q * key).sum() / len(q) ** 0.5) for key in keys]
    total = sum(weights)
    return torch.stack([w / total * v for w, v in zip(weights, values, strict=True)]).sum(0)

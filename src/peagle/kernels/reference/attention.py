"""Attention over a paged cache, in torch.

Shapes: I items, Q rows each, N rows in all, S slots, h heads, g key-value heads, D head dimension,
T positions that a block table can hold. The contract is kernels/rows.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.reference.linear import at_least_float32
from peagle.kernels.rows import PagedRows


class Scores(NamedTuple):
    """How queries and keys become weights."""

    scale: float | None = None  # of their products; None: D ** -0.5
    cap: float | None = None  # scores s become cap * tanh(s / cap)
    sinks: Tensor | None = None  # [h]: of each head a score more, which no value stands behind

    @property
    def is_default(self) -> bool:
        return self == PLAIN

    @property
    def is_softmax(self) -> bool:
        """Whether weights are the softmax of scaled products and nothing else."""
        return self.cap is None and self.sinks is None


PLAIN = Scores()


def paged_attention(
    q: Tensor,  # [N, h, D]
    keys: Tensor,  # [S, g, D]
    values: Tensor,  # [S, g, D]
    rows: PagedRows,
    window: int | None,
    scores: Scores = PLAIN,
) -> Tensor:
    """-> [N, h, D]; zeros for a row that sees no key. `num_splits` does not matter here."""
    there = _written(rows) & _may_be_seen(rows, window)  # [I, T]
    slots = _slots(rows).where(there, 0)
    k, v = _only(there, keys[slots]), _only(there, values[slots])
    out = attend(_by_item(rows, q), k, v, _visible(rows, window), scores)
    return out.flatten(0, 1) if rows.row_starts is None else out[_is_given(rows)]


def attend(
    q: Tensor,  # [..., Q, h, D]
    k: Tensor,  # [..., T, g, D]
    v: Tensor,  # [..., T, g, D]
    visible: Tensor,  # [..., Q, T]
    scores: Scores,
) -> Tensor:
    """-> [..., Q, h, D]; zeros for a row that sees no key."""
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    # Heads that share a key-value head stand side by side: r of them per group.
    grouped = at_least_float32(q).reshape(*q.shape[:-2], k.shape[-2], -1, q.shape[-1])
    products = torch.einsum("...qgrd,...tgd->...grqt", grouped, at_least_float32(k)) * scale
    if scores.cap is not None:
        products = scores.cap * (products / scores.cap).tanh()
    hidden = ~visible[..., None, None, :, :]
    weights = _softmax(products.masked_fill(hidden, -torch.inf), scores.sinks)
    # A row that sees nothing would be NaN after the softmax: hence the second mask.
    weights = weights.masked_fill(hidden, 0)
    out = torch.einsum("...grqt,...tgd->...qgrd", weights, at_least_float32(v))
    return out.reshape(q.shape).to(q.dtype)


def _by_item(rows: PagedRows, x: Tensor) -> Tensor:
    """Rows [N, ...] -> [I, Q, ...]; zeros where an item has fewer."""
    shape = len(rows.starts), rows.rows_per_item, *x.shape[1:]
    if rows.row_starts is None:
        return x.reshape(shape)
    padded = x.new_zeros(shape)
    padded[_is_given(rows)] = x
    return padded


def _is_given(rows: PagedRows) -> Tensor:
    """[I, Q]: whether the item has so many rows, where rows are shared."""
    assert rows.row_starts is not None
    offsets = torch.arange(rows.rows_per_item, device=rows.row_starts.device)
    return offsets < rows.row_starts.diff()[:, None]


def _softmax(products: Tensor, sinks: Tensor | None) -> Tensor:
    """products  # [..., g, r, Q, T]"""
    if sinks is None:
        return products.softmax(-1)
    groups, rows = products.shape[-4:-2]
    sink = sinks.to(products.dtype).view(groups, rows, 1, 1).expand(*products.shape[:-1], 1)
    return torch.cat((products, sink), dim=-1).softmax(-1)[..., :-1]


def _visible(rows: PagedRows, window: int | None) -> Tensor:
    """Which keys each row sees: [I, Q, T]."""
    key = _key_positions(rows)
    offset = torch.arange(rows.rows_per_item, device=key.device)
    was_written = _written(rows)[:, None]
    if rows.ancestors is not None:
        return was_written & _visible_in_trees(rows, rows.ancestors, window)
    row = (rows.starts[:, None] + offset)[..., None]  # [I, Q, 1]
    is_not_later = key <= row
    if window is None:
        return was_written & is_not_later
    is_in_window = key > row - window
    return was_written & is_not_later & is_in_window


def _visible_in_trees(rows: PagedRows, ancestors: Tensor, window: int | None) -> Tensor:
    """The keys before the tree, and of its own rows the ancestors."""
    shape = len(rows.starts), rows.rows_per_item, 1
    key, starts = _key_positions(rows), rows.starts[:, None, None]
    place = key - starts  # [I, 1, T]: rows of the tree from 0 on
    is_ancestor = (ancestors.view(shape) >> place.clamp(0, 63)) & 1 > 0
    visible = (place < 0) | (is_ancestor & (place < 64))
    if window is None:
        return visible
    position = _by_item(rows, rows.positions).view(shape)
    if rows.first_row:  # where its earlier rows stand is not known here; no window is so short
        return visible & ((place >= 0) | (key > position - window))
    own = place.clamp(0, rows.rows_per_item - 1).long()
    key_position = torch.where(place < 0, key, position.transpose(1, 2).gather(2, own))
    return visible & (key_position > position - window)


def _written(rows: PagedRows) -> Tensor:
    """[I, T]"""
    return _key_positions(rows) < rows.ends[:, None]


def _slots(rows: PagedRows) -> Tensor:
    """The slot of every position of each item's sequence: [I, T]."""
    positions = _key_positions(rows)
    blocks = rows.block_tables[rows.tables].long()[:, positions // rows.block_size]
    return blocks * rows.block_size + positions % rows.block_size


def _key_positions(rows: PagedRows) -> Tensor:
    """[T]: never beyond the table."""
    length = rows.block_tables.shape[1] * rows.block_size
    return torch.arange(length, device=rows.block_tables.device)


def _may_be_seen(rows: PagedRows, window: int | None) -> Tensor:
    """[I, T]: blocks that the window has passed may be another sequence's."""
    lowest = 0 if window is None else (rows.starts[:, None] - window + 1).clamp(min=0)
    return _key_positions(rows) >= lowest


def _only(there: Tensor, cached: Tensor) -> Tensor:
    """[I, T, g, D] with zeros for what is not there, as that may be NaN."""
    return at_least_float32(cached).masked_fill(~there[..., None, None], 0)

"""Which layers share a block table: those that keep the same positions.

A layer with a sliding window needs no position that the window has passed, so layers are grouped
by window. A request has a block table for each group, and all tables take blocks from one pool. For
that blocks are of equal size: a block has as many planes as a group has layers at most, and a plane
holds one layer's keys and values of `block_size` positions. Layers with one window that are more
than there are planes become several groups. Where no layer's window is shorter than requests are,
there is one table, and target and drafter have caches of their own over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from peagle.models.drafter import CacheLayout

# Each group costs the host a table per request and the device a launch per pass: fewer groups are
# taken where more would save no more than this share of a request's memory.
WORTH_A_GROUP = 0.05
MAX_GROUPS = 8


class LayerPlace(NamedTuple):
    """Where a layer's keys and values lie: in which planes of which table's blocks."""

    table: int
    plane: int


class Window(NamedTuple):
    """Of a group of layers."""

    size: int  # a row sees so many positions, its own included
    max_blocks: int  # that hold what the rows of any step may see and write

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that rows from `position` on may see."""
        return max(position - self.size + 1, 0) // block_size


class LayerGroups(NamedTuple):
    windows: tuple[Window | None, ...]  # of each table; None: nothing is ever passed
    target: tuple[LayerPlace, ...]  # by layer
    drafter: tuple[LayerPlace, ...] = ()
    num_planes: int | None = None  # of one cache for both models; None: each has one of its own

    def blocks_for(self, num_blocks: int) -> int:
        """Blocks that a request takes at most, of all tables, whose tokens fill `num_blocks`."""
        return sum(_held(window, num_blocks) for window in self.windows)

    def slot_bytes(self, layouts: Sequence[CacheLayout], dtype: torch.dtype) -> int:
        """What a block takes for each of its positions; `layouts` of target and drafter."""
        if self.num_planes is None:
            return sum(slot_bytes(layout, dtype) for layout in layouts)
        return self.num_planes * max(layout.layer_bytes(dtype) for layout in layouts)


def group_layers(
    target: CacheLayout,
    drafter: CacheLayout | None,
    *,
    max_blocks: int,  # of the longest request
    block_size: int,
    max_rows: int,  # that a step may write behind the lowest position that is still to come
    decode_rows: int,  # the same of a request that decodes
) -> LayerGroups:
    def num_held(size: int | None, num_rows: int) -> int:
        if size is None:
            return max_blocks
        return min(-(-(size - 1 + num_rows) // block_size) + 1, max_blocks)

    def window_of(size: int | None) -> Window | None:
        passes = size is not None and num_held(size, decode_rows) < max_blocks
        return Window(size, num_held(size, max_rows)) if size is not None and passes else None

    num_drafter = 0 if drafter is None else drafter.num_layers
    own = [window_of(size) for size in target.windows or (None,) * target.num_layers]
    together = [*own, *(None,) * num_drafter]
    windows = sorted(set(together), key=lambda w: -1 if w is None else w.size)
    counts = [together.count(window) for window in windows]
    if len(windows) == 1:
        return _one_table(windows[0], target.num_layers, num_drafter)

    def cost(num_planes: int) -> int:
        groups = (_num_groups(count, num_planes) for count in counts)
        held = (num_held(window and window.size, decode_rows) for window in windows)
        return num_planes * sum(n * h for n, h in zip(groups, held, strict=True))

    sizes = {n: sum(_num_groups(c, n) for c in counts) for n in range(1, max(counts) + 1)}
    fitting = [n for n, num_groups in sizes.items() if num_groups <= MAX_GROUPS]
    best = min(map(cost, fitting), default=0)
    # Rows of the drafter may be the beginnings of the target's, not the other way round.
    is_wider = drafter is not None and drafter.row_size > target.row_size
    if is_wider or not fitting or best >= len(together) * max_blocks:
        return _one_table(None, target.num_layers, num_drafter)
    near = [n for n in fitting if cost(n) <= (1 + WORTH_A_GROUP) * best]
    num_planes = min(near, key=lambda n: (sizes[n], cost(n)))
    tables: list[Window | None] = []
    places = [LayerPlace(0, 0)] * len(together)
    for window in windows:
        layers = [n for n, own_window in enumerate(together) if own_window == window]
        for place, layer in enumerate(layers):
            places[layer] = LayerPlace(len(tables) + place // num_planes, place % num_planes)
        tables += [window] * _num_groups(len(layers), num_planes)
    cut = target.num_layers
    return LayerGroups(tuple(tables), tuple(places[:cut]), tuple(places[cut:]), num_planes)


def slot_bytes(layout: CacheLayout, dtype: torch.dtype) -> int:
    return layout.num_layers * layout.layer_bytes(dtype)


def one_table(num_layers: int) -> tuple[LayerPlace, ...]:
    return tuple(LayerPlace(0, layer) for layer in range(num_layers))


def _one_table(window: Window | None, num_target: int, num_drafter: int) -> LayerGroups:
    return LayerGroups((window,), one_table(num_target), one_table(num_drafter))


def _held(window: Window | None, num_blocks: int) -> int:
    return num_blocks if window is None else min(window.max_blocks, num_blocks)


def _num_groups(num_layers: int, num_planes: int) -> int:
    return -(-num_layers // num_planes)

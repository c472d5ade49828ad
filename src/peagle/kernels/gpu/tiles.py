"""How attention is cut into programs of the GPU. No Triton here: the engine plans with it too."""

from __future__ import annotations

from typing import NamedTuple

# More rows per program than this and an item's rows are divided over several: its registers hold
# a float32 result of that many rows.
MAX_TILE_ROWS = 64
# The smallest side that a matrix product of the GPU takes.
MIN_SIDE = 16
COARSE_SPLIT, FINE_SPLIT = 128, 64  # keys of a part: one tile
MANY_SPLITS = 8  # from so many on tiles are as small as the finest part


class Tile(NamedTuple):
    block_m: int  # rows: queries times the heads that share a key-value head
    block_n: int  # keys
    block_d: int  # head dimension, padded
    num_warps: int
    num_stages: int


def tile(num_rows: int, group: int, dim: int, num_splits: int) -> Tile:
    """For items of `num_rows` rows and `group` heads per key-value head."""
    block_m = min(padded(num_rows * group), MAX_TILE_ROWS)
    small = block_m == MAX_TILE_ROWS or dim > 64 or num_splits >= MANY_SPLITS
    block_n = 32 if dim > 128 else FINE_SPLIT if small else COARSE_SPLIT
    return Tile(block_m, block_n, padded(dim), num_warps=4, num_stages=3)


def padded(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(MIN_SIDE, power_of_two(size))


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def choose_splits(num_items: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """Over how many programs an item's keys are divided. Tiles of keys follow each other, at
    more than a microsecond each, while most of the GPU is idle: so even short contexts are
    divided, as long as all parts run at once."""
    fits_at_once = num_sms // (num_items * kv_heads)
    finest = max_context // FINE_SPLIT
    if MANY_SPLITS <= finest <= fits_at_once:
        return finest
    return max(min(fits_at_once, max_context // COARSE_SPLIT), 1)

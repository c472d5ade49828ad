"""How attention is cut into programs of the GPU. No Triton here: the engine plans with it too."""

from __future__ import annotations

from typing import NamedTuple

# More rows per program than this and an item's rows are divided over several: its registers hold
# a float32 result of that many rows.
MAX_TILE_ROWS = 64
# The smallest side that a matrix product of the GPU takes.
MIN_SIDE = 16
COARSE_SPLIT, FINE_SPLIT = 128, 64  # keys of a part: one tile
PARTS_PER_SM = 32  # that are worth their writing when they do not run at once
FEW_PROGRAMS = 16  # without splits: up to so many, fine parts find room on a large GPU


class Tile(NamedTuple):
    block_m: int  # rows: queries times the heads that share a key-value head
    block_n: int  # keys
    block_d: int  # head dimension, padded
    num_warps: int
    num_stages: int


def tile(num_rows: int, group: int, dim: int, programs: int) -> Tile:
    """For items of `num_rows` rows and `group` heads per key-value head; `programs` is the number
    of items times that of key-value heads. The tile of keys does not depend on the context, nor,
    with few programs, on the rows: one request has the same one with drafts and without."""
    block_m = min(padded(num_rows * group), MAX_TILE_ROWS)
    small = programs <= FEW_PROGRAMS or block_m == MAX_TILE_ROWS or dim > 64
    block_n = 32 if dim > 128 else FINE_SPLIT if small else COARSE_SPLIT
    return Tile(block_m, block_n, padded(dim), num_warps=4, num_stages=3)


def batch_invariant_tile(dim: int) -> Tile:
    """For items of any number of rows: one tile of keys, and one layout of it over threads, which
    sums of weights follow."""
    return Tile(32, keys_of_a_part(dim), padded(dim), num_warps=4, num_stages=3)


def keys_of_a_part(dim: int) -> int:
    return 32 if dim > 128 else FINE_SPLIT


def padded(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(MIN_SIDE, power_of_two(size))


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def choose_splits(num_items: int, kv_heads: int, max_context: int, num_sms: int) -> int:
    """Over how many programs an item's keys are divided. Tiles of keys follow each other, at
    more than a microsecond each, while most of the GPU is idle: so even short contexts are
    divided, as long as all parts run at once."""
    programs = num_items * kv_heads
    shortest = FINE_SPLIT if programs <= FEW_PROGRAMS else COARSE_SPLIT
    return max(min(num_sms // programs, max_context // shortest), 1)


def batch_invariant_splits(
    num_items: int, kv_heads: int, dim: int, max_context: int, num_sms: int
) -> int:
    """A part for each tile of keys up to `max_context`, which counts the new rows, too; 1 where the
    GPU is full without and parts would only be written and read. The results are the same."""
    programs, parts = num_items * kv_heads, -(-max_context // keys_of_a_part(dim))
    is_full = programs >= num_sms // 2
    return 1 if is_full and programs * parts > PARTS_PER_SM * num_sms else max(parts, 1)

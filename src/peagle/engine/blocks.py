"""Which cache blocks a sequence holds.

Blocks are fixed-size pages, so memory never fragments. On a CPU a sequence still prefers blocks
that follow each other: attention then reads its cache as one slice instead of gathering it. For
that each sequence reserves, softly, the range it expects to grow into; when blocks run short,
others may take from that range.
"""

from __future__ import annotations

from collections.abc import Iterable

from peagle.engine.block_pools import BlockPool, RangePool, StackPool


class BlockTable:
    """The blocks of one sequence, in order of position."""

    def __init__(self, block_size: int, reserved: range) -> None:
        self.block_size = block_size
        self.reserved = reserved
        self.blocks: list[int] = []
        self.contiguous = True

    @property
    def capacity(self) -> int:
        return len(self.blocks) * self.block_size

    def append(self, block: int) -> None:
        if self.blocks and block != self.blocks[-1] + 1:
            self.contiguous = False
        self.blocks.append(block)

    def slot(self, position: int) -> int:
        """Index of a position's entry in the flat cache."""
        block = self.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size


class BlockAllocator:
    """`contiguous`: whether tables try to hold blocks that follow each other."""

    def __init__(self, num_blocks: int, block_size: int, contiguous: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool: BlockPool = RangePool(num_blocks) if contiguous else StackPool(num_blocks)

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open_table(self, expected_tokens: int) -> BlockTable:
        """An empty table with a soft reservation, or without one if no free range is that long."""
        return BlockTable(self.block_size, self._pool.reserve(self.blocks_for(expected_tokens)))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all. False, and nothing taken, if blocks fall short."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            last = table.blocks[-1] if table.blocks else None
            table.append(self._pool.take(last, table.reserved))
        return True

    def close_table(self, table: BlockTable) -> None:
        """Gives everything back; the table is empty afterwards."""
        self._pool.give_back(table.blocks, table.reserved)
        table.blocks = []
        table.reserved = range(0)
        table.contiguous = True

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that each block is free or held exactly once."""
        held = [block for table in tables for block in table.blocks]
        assert len(held) == len(set(held)), "a block is held twice"
        assert not any(self._pool.is_free(block) for block in held), "a held block is marked free"
        num_free = self._pool.count_free()
        assert self.num_free == num_free == self.num_blocks - len(held), "a block is lost"

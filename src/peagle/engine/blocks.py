"""Which cache blocks a sequence holds.

Blocks are fixed-size pages, so memory never fragments. A sequence still prefers blocks that
follow each other: attention then reads its cache as one slice instead of gathering it. For that
each sequence reserves, softly, the range it expects to grow into; when blocks run short, others
may take from that range.
"""

from __future__ import annotations

from collections.abc import Iterable


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
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = [True] * num_blocks
        self._unreserved = [True] * num_blocks
        self.num_free = num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open_table(self, expected_tokens: int) -> BlockTable:
        """An empty table with a soft reservation, or without one if no free range is that long."""
        reserved = self._find_range(self.blocks_for(expected_tokens))
        for block in reserved:
            self._unreserved[block] = False
        return BlockTable(self.block_size, reserved)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all. False, and nothing taken, if blocks fall short."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            self._take(table)
        return True

    def close_table(self, table: BlockTable) -> None:
        """Gives everything back; the table is empty afterwards."""
        for block in table.blocks:
            assert not self._free[block], f"block {block} freed twice"
            self._free[block] = True
        self.num_free += len(table.blocks)
        for block in table.reserved:
            self._unreserved[block] = True
        table.blocks = []
        table.reserved = range(0)
        table.contiguous = True

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that each block is free or held exactly once."""
        held = [block for table in tables for block in table.blocks]
        assert len(held) == len(set(held)), "a block is held twice"
        assert all(not self._free[block] for block in held), "a held block is marked free"
        assert self.num_free == sum(self._free) == self.num_blocks - len(held), "a block is lost"

    def _take(self, table: BlockTable) -> None:
        block = self._choose(table)
        self._free[block] = False
        self.num_free -= 1
        table.append(block)

    def _choose(self, table: BlockTable) -> int:
        if not table.blocks and table.reserved and self._free[table.reserved.start]:
            return table.reserved.start
        following = table.blocks[-1] + 1 if table.blocks else self.num_blocks
        if following < self.num_blocks and self._free[following]:
            mine = following in table.reserved
            if mine or self._unreserved[following]:
                return following
        free = [b for b in range(self.num_blocks) if self._free[b]]
        return next((b for b in free if self._unreserved[b]), free[0])

    def _find_range(self, length: int) -> range:
        start = 0
        for block in range(self.num_blocks):
            if not (self._free[block] and self._unreserved[block]):
                start = block + 1
            elif block + 1 - start == length:
                return range(start, block + 1)
        return range(0)

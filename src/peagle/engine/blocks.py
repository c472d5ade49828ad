"""Which cache blocks a sequence holds: its own, and, at its beginning, some that others hold, too.

Blocks are fixed-size pages, so memory never fragments. On a CPU a sequence still prefers blocks
that follow each other: attention then reads its cache as one slice instead of gathering it. For
that each sequence reserves, softly, the range it expects to grow into; when blocks run short,
others may take from that range.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from peagle.engine.block_pools import BlockPool, RangePool, StackPool
from peagle.engine.prefix_cache import Key, PrefixCache


class BlockTable:
    """The blocks of one sequence, in order of position."""

    def __init__(self, block_size: int, reserved: range) -> None:
        self.block_size = block_size
        self.reserved = reserved
        self.blocks: list[int] = []
        self.num_known = 0  # blocks, from the first on, that the prefix cache has been told of
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
        self._prefixes = PrefixCache()
        self._num_references: Counter[int] = Counter()  # of blocks that tables hold

    @property
    def num_free(self) -> int:
        """Blocks that can be had, if the prefix cache gives up those that nobody holds."""
        return self._pool.num_free + self._prefixes.num_unused

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open_table(self, expected_tokens: int, keys: Sequence[Key] = ()) -> BlockTable:
        """A table of the known blocks that these keys begin with. Without any it is empty, with a
        soft reservation, or without one if no free range is that long."""
        shared = self._prefixes.find(keys)
        reserved = range(0) if shared else self._pool.reserve(self.blocks_for(expected_tokens))
        table = BlockTable(self.block_size, reserved)
        for block in shared:
            self._prefixes.take(block)
            self._hold(table, block)
        table.num_known = len(shared)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all. False, and nothing taken, if blocks fall short."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.num_free:
            return False
        for _ in range(missing - self._pool.num_free):
            self._pool.give_back([self._prefixes.evict()], range(0))
        for _ in range(missing):
            last = table.blocks[-1] if table.blocks else None
            self._hold(table, self._pool.take(last, table.reserved))
        return True

    def remember(self, table: BlockTable, keys: Sequence[Key]) -> None:
        """Tells the prefix cache what the table's first blocks hold, each for good."""
        for n in range(table.num_known, len(keys)):
            self._prefixes.add(keys[n], table.blocks[n])
        table.num_known = max(table.num_known, len(keys))

    def close_table(self, table: BlockTable) -> None:
        """Gives everything back; the table is empty afterwards. Known blocks stay in the prefix
        cache; the last of them is evicted first, for it is of no use without those before it."""
        unknown: list[int] = []
        for block in reversed(table.blocks):
            assert self._num_references[block] > 0, f"block {block} freed twice"
            self._num_references[block] -= 1
            if not self._num_references[block]:
                del self._num_references[block]
                if not self._prefixes.release(block):
                    unknown.append(block)
        self._pool.give_back(unknown[::-1], table.reserved)
        table.blocks, table.num_known = [], 0
        table.reserved = range(0)
        table.contiguous = True

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that each block is free, unused in the prefix cache, or held, and by whom."""
        held = Counter(block for table in tables for block in table.blocks)
        assert not any(self._pool.is_free(block) for block in held), "a held block is marked free"
        assert self._num_references == held, "a block is lost, or held by others than it says"
        num_free, num_unused = self._pool.count_free(), self._prefixes.num_unused
        assert self._pool.num_free == num_free, "free blocks are counted wrongly"
        assert num_free + num_unused == self.num_blocks - len(held), "a block is lost"

    def check_prefixes(self) -> None:
        self._prefixes.check(self._num_references.keys())

    def _hold(self, table: BlockTable, block: int) -> None:
        self._num_references[block] += 1
        table.append(block)

"""Which cache blocks a sequence holds: its own, and, at its beginning, some that others hold, too.

Blocks are fixed-size pages, so memory never fragments. On a CPU a sequence still prefers blocks
that follow each other: attention then reads its cache as one slice instead of gathering it. For
that each sequence reserves, softly, the range it expects to grow into; when blocks run short,
others may take from that range.

Layers with a sliding window have tables of their own (layer_groups.py). What the window has passed
goes back to the pool: the entry stays in the table, and nobody reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from peagle.engine.block_pools import BlockPool, RangePool, StackPool
from peagle.engine.layer_groups import Window
from peagle.engine.prefix_cache import Key, PrefixCache


class BlockTable:
    """The blocks of one sequence, in order of position: those of the first group of layers, and
    `others`, the tables of the other groups."""

    def __init__(
        self, block_size: int, reserved: range, window: Window | None = None, num_passed: int = 0
    ) -> None:
        self.block_size = block_size
        self.reserved = reserved
        self.window = window
        self.others: tuple[BlockTable, ...] = ()
        self.num_passed = num_passed  # entries, from the first on, that the window has passed
        self.blocks: list[int] = [0] * num_passed
        self.num_known = 0  # blocks, from the first on, that the prefix cache has been told of
        self.num_written = 0  # entries that the device has
        self.contiguous = True  # those that are held

    @property
    def groups(self) -> tuple[BlockTable, ...]:
        return (self, *self.others)

    @property
    def held(self) -> list[int]:
        return self.blocks[self.num_passed :]

    @property
    def capacity(self) -> int:
        """Positions that all groups have room for."""
        num_blocks = len(self.blocks)
        for other in self.others:
            num_blocks = min(num_blocks, len(other.blocks))
        return num_blocks * self.block_size

    def append(self, block: int) -> None:
        if len(self.blocks) > self.num_passed and block != self.blocks[-1] + 1:
            self.contiguous = False
        self.blocks.append(block)

    def num_missing(self, num_blocks: int) -> int:
        """Entries to append, to have so many; with a window, no more than it may hold."""
        if self.window is not None:
            num_blocks = min(num_blocks, self.num_passed + self.window.max_blocks)
        return max(num_blocks - len(self.blocks), 0)

    def pass_by(self, position: int) -> list[int]:
        """Lets go of the blocks that no row from `position` on can see -> these."""
        if self.window is None:
            return []
        first = min(self.window.first_block(position, self.block_size), len(self.blocks))
        passed = self.blocks[self.num_passed : first]
        self.num_passed = max(first, self.num_passed)
        if passed and not self.contiguous:
            held = self.held
            self.contiguous = all(b == a + 1 for a, b in pairwise(held))
        return passed

    @property
    def passes_next(self) -> int | None:
        """From which position on rows leave one more block of a group behind; None: never."""
        ends = [
            (group.num_passed + 1) * group.block_size + group.window.size - 1
            for group in self.groups
            if group.window is not None
        ]
        return min(ends, default=None)

    def slot(self, position: int) -> int:
        """Index of a position's entry in the flat cache."""
        block = self.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size


class BlockAllocator:
    """`contiguous`: whether tables try to hold blocks that follow each other. `windows`: of the
    groups of layers that have a table each."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        contiguous: bool = True,
        windows: Sequence[Window | None] = (None,),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self._pool: BlockPool = RangePool(num_blocks) if contiguous else StackPool(num_blocks)
        self._prefixes = PrefixCache()
        self._num_references: dict[int, int] = {}  # of blocks that tables hold

    @property
    def num_free(self) -> int:
        """Blocks that can be had, if the prefix cache gives up those that nobody holds."""
        return self._pool.num_free + self._prefixes.num_unused

    @property
    def has_windows(self) -> bool:
        return any(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open_table(self, expected_tokens: int, keys: Sequence[Key] = ()) -> BlockTable:
        """A table of the known blocks that these keys begin with. Without any it is empty, with a
        soft reservation, or without one if no free range is that long."""
        num_known = self._num_known(keys)
        tables = []
        for group, window in enumerate(self.windows):
            first = 0
            if window is not None:
                first = window.first_block(num_known * self.block_size, self.block_size)
            table = BlockTable(self.block_size, range(0), window, first)
            for key in keys[first:num_known]:
                block = self._prefixes.take(_group_key(key, group))
                self._hold(table, block)
            if not num_known:
                table.reserved = self._pool.reserve(
                    table.num_missing(self.blocks_for(expected_tokens))
                )
            table.num_known = num_known
            tables.append(table)
        tables[0].others = tuple(tables[1:])
        return tables[0]

    def _num_known(self, keys: Sequence[Key]) -> int:
        """Blocks of the longest prefix that is known: all of them where there is no window, those
        that the row behind the prefix sees where there is one."""
        most, runs = len(keys), list[list[int]]()
        for group, window in enumerate(self.windows):
            run, ends = 0, [0]  # known blocks that end with each
            for key in keys[:most]:
                run = run + 1 if self._prefixes.knows(_group_key(key, group)) else 0
                if window is None and not run:
                    break
                ends.append(run)
            most = min(most, len(ends) - 1)
            runs.append(ends)

        def is_there(length: int) -> bool:
            row = length * self.block_size
            return all(
                window is None or ends[length] >= length - window.first_block(row, self.block_size)
                for window, ends in zip(self.windows, runs, strict=True)
            )

        return next(length for length in range(most, -1, -1) if is_there(length))

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Makes room for `num_tokens` in all; a group with a window, for as many of them as it may
        hold at once. False, and nothing taken, if blocks fall short."""
        num_blocks = self.blocks_for(num_tokens)
        missing = [group.num_missing(num_blocks) for group in table.groups]
        if sum(missing) > self.num_free:
            return False
        for _ in range(sum(missing) - self._pool.num_free):
            self._pool.give_back([self._prefixes.evict()], range(0))
        for group, count in zip(table.groups, missing, strict=True):
            for _ in range(count):
                last = group.blocks[-1] if group.blocks else None
                self._hold(group, self._pool.take(last, group.reserved))
        return True

    def pass_by(self, table: BlockTable, position: int) -> None:
        """Frees what no row from `position` on can see."""
        for group in table.groups:
            self._release(group.pass_by(position), range(0))

    def remember(self, table: BlockTable, keys: Sequence[Key]) -> None:
        """Tells the prefix cache what the table's first blocks hold, each for good."""
        for number, group in enumerate(table.groups):
            for n in range(max(group.num_known, group.num_passed), len(keys)):
                self._prefixes.add(_group_key(keys[n], number), group.blocks[n])
            group.num_known = max(group.num_known, len(keys))

    def close_table(self, table: BlockTable) -> None:
        """Gives everything back; the table is empty afterwards. Known blocks stay in the prefix
        cache; the last of them is evicted first, for it is of no use without those before it."""
        for group in table.groups:
            self._release(group.held[::-1], group.reserved)
            group.blocks, group.num_known, group.num_passed = [], 0, 0
            group.reserved = range(0)
            group.contiguous = True

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Asserts that each block is free, unused in the prefix cache, or held, and by whom."""
        groups = (group for table in tables for group in table.groups)
        held = Counter(block for group in groups for block in group.held)
        assert not any(self._pool.is_free(block) for block in held), "a held block is marked free"
        assert self._num_references == held, "a block is lost, or held by others than it says"
        num_free, num_unused = self._pool.count_free(), self._prefixes.num_unused
        assert self._pool.num_free == num_free, "free blocks are counted wrongly"
        assert num_free + num_unused == self.num_blocks - len(held), "a block is lost"

    def check_prefixes(self) -> None:
        self._prefixes.check(self._num_references.keys())

    def _hold(self, table: BlockTable, block: int) -> None:
        references = self._num_references
        references[block] = references.get(block, 0) + 1
        table.append(block)

    def _release(self, blocks: Sequence[int], reserved: range) -> None:
        """Blocks of one table, in the order in which they may be evicted."""
        unknown: list[int] = []
        for block in blocks:
            count = self._num_references.pop(block, 0)
            assert count > 0, f"block {block} freed twice"
            if count > 1:
                self._num_references[block] = count - 1
            elif not self._prefixes.release(block):
                unknown.append(block)
        self._pool.give_back(unknown[::-1], reserved)


def _group_key(key: Key, group: int) -> Key:
    """A group's blocks hold its own layers' rows alone."""
    return key + bytes([group]) if group else key

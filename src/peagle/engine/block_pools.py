"""Where free blocks come from: in order, so that caches are slices, or from a stack.

On a CPU attention reads a cache of blocks that follow each other as one slice. GPU kernels read
block tables and gain nothing from it, and a GPU holds many more blocks: there a stack serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from peagle.engine.free_ranges import FreeRanges


class BlockPool(Protocol):
    @property
    def num_free(self) -> int: ...

    def is_free(self, block: int) -> bool: ...

    def count_free(self) -> int:
        """Counted anew, block by block or range by range: `num_free` must say the same."""
        ...

    def reserve(self, length: int) -> range:
        """A range that is kept for one table while others can do without; may be empty."""
        ...

    def take(self, last: int | None, reserved: range) -> int:
        """A free block for the table whose newest block is `last`."""
        ...

    def give_back(self, blocks: Sequence[int], reserved: range) -> None:
        """A table's blocks and the range that was reserved for it."""
        ...


class StackPool:
    """No reservations, and the same small cost for each block however many there are."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = list(reversed(range(num_blocks)))
        self._free = bytearray([True]) * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._stack)

    def is_free(self, block: int) -> bool:
        return bool(self._free[block])

    def count_free(self) -> int:
        return self._free.count(True)

    def reserve(self, length: int) -> range:
        return range(0)

    def take(self, last: int | None, reserved: range) -> int:
        block = self._stack.pop()
        self._free[block] = False
        return block

    def give_back(self, blocks: Sequence[int], reserved: range) -> None:
        for block in reversed(blocks):
            assert not self._free[block], f"block {block} freed twice"
            self._free[block] = True
            self._stack.append(block)


class RangePool:
    """Gives a table the block behind its last one where it can.

    Each operation costs as much as there are ranges of free blocks, which are few.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = FreeRanges(num_blocks)
        self._unreserved = FreeRanges(num_blocks)  # those free ones that no table reserved
        self._reserved: set[int] = set()

    @property
    def num_free(self) -> int:
        return self._free.size

    def is_free(self, block: int) -> bool:
        return block in self._free

    def count_free(self) -> int:
        return sum(map(len, self._free.ranges))

    def reserve(self, length: int) -> range:
        found = self._unreserved.first_run(length)
        for block in found:
            self._unreserved.remove(block)
        self._reserved.update(found)
        return found

    def take(self, last: int | None, reserved: range) -> int:
        block = self._choose(last, reserved)
        self._free.remove(block)
        if block in self._unreserved:
            self._unreserved.remove(block)
        return block

    def give_back(self, blocks: Sequence[int], reserved: range) -> None:
        self._reserved.difference_update(reserved)
        for block in blocks:
            assert block not in self._free, f"block {block} freed twice"
            self._free.add(block)
        for block in {*blocks, *reserved}:
            if block in self._free and block not in self._reserved:
                self._unreserved.add(block)

    def _choose(self, last: int | None, reserved: range) -> int:
        wanted = last + 1 if last is not None else reserved.start
        mine = wanted in reserved and wanted in self._free
        if mine or (last is not None and wanted in self._unreserved):
            return wanted
        lowest = self._unreserved.lowest
        chosen = self._free.lowest if lowest is None else lowest
        assert chosen is not None, "no block is free"
        return chosen

"""A set of block numbers, kept as ranges: the lowest one and a long run are found at once."""

from __future__ import annotations

from bisect import bisect_right


class FreeRanges:
    """Sorted, disjoint, merged where they touch. There are few: about one between two tables."""

    def __init__(self, num_blocks: int) -> None:
        self._starts = [0] if num_blocks else []
        self._stops = [num_blocks] if num_blocks else []
        self.size = num_blocks

    @property
    def ranges(self) -> list[range]:
        return [range(*ends) for ends in zip(self._starts, self._stops, strict=True)]

    @property
    def lowest(self) -> int | None:
        return self._starts[0] if self._starts else None

    def __contains__(self, block: int) -> bool:
        index = bisect_right(self._starts, block) - 1
        return index >= 0 and block < self._stops[index]

    def first_run(self, length: int) -> range:
        """The lowest `length` blocks that follow each other; empty if there are none."""
        for start, stop in zip(self._starts, self._stops, strict=True):
            if stop - start >= length:
                return range(start, start + length)
        return range(0)

    def add(self, block: int) -> None:
        index = bisect_right(self._starts, block)  # of the range behind the block
        assert index == 0 or self._stops[index - 1] <= block, f"block {block} is here already"
        joins_left = index > 0 and self._stops[index - 1] == block
        joins_right = index < len(self._starts) and self._starts[index] == block + 1
        if joins_left and joins_right:
            del self._starts[index], self._stops[index - 1]
        elif joins_left:
            self._stops[index - 1] = block + 1
        elif joins_right:
            self._starts[index] = block
        else:
            self._starts.insert(index, block)
            self._stops.insert(index, block + 1)
        self.size += 1

    def remove(self, block: int) -> None:
        assert block in self, f"block {block} is not here"
        index = bisect_right(self._starts, block) - 1
        start, stop = self._starts[index], self._stops[index]
        if stop - start == 1:
            del self._starts[index], self._stops[index]
        elif block == start:
            self._starts[index] = block + 1
        elif block == stop - 1:
            self._stops[index] = block
        else:
            self._stops[index] = block
            self._starts.insert(index + 1, block + 1)
            self._stops.insert(index + 1, stop)
        self.size -= 1

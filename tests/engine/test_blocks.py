"""The allocator under any sequence of operations: no block twice, none lost."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peagle.engine.blocks import BlockAllocator, BlockTable
from peagle.engine.free_ranges import FreeRanges
from peagle.engine.layer_groups import Window

NUM_BLOCKS, BLOCK_SIZE = 12, 3
# Chains of keys that begin alike, as those of sequences do.
KEYS = st.text("ab", max_size=5).map(lambda s: [s[: n + 1].encode() for n in range(len(s))])


class Allocation(RuleBasedStateMachine):
    contiguous = True

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE, self.contiguous)
        self.contents: list[bytes | None] = [None] * NUM_BLOCKS  # what a block is known to hold
        self.tables: list[BlockTable] = []
        self.grown: list[int] = []  # tokens each table has room for

    @rule(expected=st.integers(1, NUM_BLOCKS * BLOCK_SIZE + 5))
    def open(self, expected: int) -> None:
        free_before = self.allocator.num_free
        self.tables.append(self.allocator.open_table(expected))
        self.grown.append(0)
        assert self.allocator.num_free == free_before  # a reservation takes nothing

    @rule(expected=st.integers(1, NUM_BLOCKS * BLOCK_SIZE), keys=KEYS)
    def open_known(self, expected: int, keys: list[bytes]) -> None:
        table = self.allocator.open_table(expected, keys)
        num_known = next((n for n, k in enumerate(keys) if k not in self.contents), len(keys))
        assert [self.contents[block] for block in table.blocks] == keys[:num_known]
        self.tables.append(table)
        self.grown.append(0)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), keys=KEYS)
    def remember(self, data: st.DataObject, keys: list[bytes]) -> None:
        """What a table knows already stays as it is."""
        table = data.draw(st.sampled_from(self.tables))
        own = [self.contents[block] for block in table.blocks[: table.num_known]]
        if None in own:  # a copy of what another block holds
            return
        keys = [*filter(None, own), *keys[len(own) :]][: len(table.blocks)]
        for block, key in zip(table.blocks[len(own) :], keys[len(own) :], strict=False):
            if key not in self.contents:
                self.contents[block] = key
        self.allocator.remember(table, keys)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, NUM_BLOCKS * BLOCK_SIZE))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables[index]
        before, free_before = list(table.blocks), self.allocator.num_free
        missing = max(-(-num_tokens // BLOCK_SIZE) - len(before), 0)
        grown = self.allocator.grow(table, num_tokens)
        # Reservations are soft: only blocks that are held can make it fail.
        assert grown == (missing <= free_before)
        assert table.blocks[: len(before)] == before
        assert len(table.blocks) == len(before) + (missing if grown else 0)
        for block in table.blocks[len(before) :]:  # somebody writes to it
            self.contents[block] = None
        if grown:
            self.grown[index] = max(self.grown[index], num_tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(index)
        self.grown.pop(index)
        self.allocator.close_table(table)
        assert table.blocks == []

    @invariant()
    def every_block_is_free_known_or_held(self) -> None:
        self.allocator.check(self.tables)
        self.allocator.check_prefixes()
        held = [block for table in self.tables for block in table.blocks]
        unknown = [block for block in held if self.contents[block] is None]
        assert len(set(unknown)) == len(unknown)  # two may hold a block, none may write to it
        assert all(len(set(table.blocks)) == len(table.blocks) for table in self.tables)
        assert self.allocator.num_free == NUM_BLOCKS - len(set(held))
        assert all(0 <= block < NUM_BLOCKS for block in held)

    @invariant()
    def contiguous_says_whether_blocks_follow_each_other(self) -> None:
        for table in self.tables:
            pairs = zip(table.blocks, table.blocks[1:], strict=False)
            assert table.contiguous == all(b == a + 1 for a, b in pairs)

    @invariant()
    def reservations_do_not_overlap(self) -> None:
        reserved = [block for table in self.tables for block in table.reserved]
        assert len(set(reserved)) == len(reserved)

    @invariant()
    def slots_of_all_positions_are_distinct(self) -> None:
        slots = [
            table.slot(p)
            for table, tokens in zip(self.tables, self.grown, strict=True)
            for p in range(tokens)
            if self.contents[table.blocks[p // BLOCK_SIZE]] is None
        ]
        assert len(set(slots)) == len(slots)
        assert all(0 <= s < NUM_BLOCKS * BLOCK_SIZE for s in slots)

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.close_table(table)
        self.allocator.check([])
        for key in filter(None, self.contents):  # what is known stays until its block is needed
            assert self.allocator._num_known([key])
        whole = self.allocator.open_table(1)
        assert self.allocator.grow(whole, NUM_BLOCKS * BLOCK_SIZE)
        self.allocator.close_table(whole)
        if self.contiguous:  # nothing stays reserved or split: all blocks are one range again
            whole = self.allocator.open_table(NUM_BLOCKS * BLOCK_SIZE)
            assert whole.reserved == range(NUM_BLOCKS)


class StackAllocation(Allocation):
    contiguous = False


Allocation.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
StackAllocation.TestCase.settings = settings(max_examples=50, stateful_step_count=30)


class Sequence(NamedTuple):
    table: BlockTable
    keys: list[bytes]
    position: list[int]  # one: of the next row


class WindowedAllocation(RuleBasedStateMachine):
    """Groups of layers with windows: each table keeps what the next row sees, and no more."""

    windows = (None, Window(5, 4), Window(1, 3))

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(16, BLOCK_SIZE, windows=self.windows)
        self.contents: list[tuple[int, bytes] | None] = [None] * 16  # group and key
        self.sequences: list[Sequence] = []

    @rule(keys=KEYS)
    def open(self, keys: list[bytes]) -> None:
        table = self.allocator.open_table(8, keys)
        known = table.num_known
        for number, group in enumerate(table.groups):
            held = [self.contents[block] for block in group.held]
            assert held == [(number, key) for key in keys[group.num_passed : known]]
        assert not any(self.is_known(keys, longer) for longer in range(known + 1, len(keys) + 1))
        self.sequences.append(Sequence(table, keys, [known * BLOCK_SIZE]))

    def is_known(self, keys: list[bytes], length: int) -> bool:
        """Whether the row behind so many blocks finds all that it sees."""
        firsts = [
            0 if window is None else max(length * BLOCK_SIZE - window.size + 1, 0) // BLOCK_SIZE
            for window in self.windows
        ]
        seen = [(g, key) for g, first in enumerate(firsts) for key in keys[first:length]]
        return all(own in self.contents for own in seen)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 24))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        table = data.draw(st.sampled_from(self.sequences)).table
        before, free_before = [list(g.blocks) for g in table.groups], self.allocator.num_free
        has_grown = self.allocator.grow(table, num_tokens)
        new = [g.blocks[len(old) :] for g, old in zip(table.groups, before, strict=True)]
        for block in (b for blocks in new for b in blocks):  # somebody writes to it
            self.contents[block] = None
        full = max(-(-num_tokens // BLOCK_SIZE) - len(before[0]), 0)
        assert len(new[0]) == (full if has_grown else 0)
        assert has_grown or sum(map(len, new)) == 0
        assert has_grown or free_before < full * len(self.windows)
        assert self.allocator.num_free == free_before - sum(map(len, new))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_rows=st.integers(1, 9), is_late=st.booleans())
    def compute(self, data: st.DataObject, num_rows: int, is_late: bool) -> None:
        """Rows that there is room for; what they leave behind is freed. An answer's blocks are
        known late: then the window has passed some of them."""
        table, keys, position = data.draw(st.sampled_from(self.sequences))
        position[0] = max(min(position[0] + num_rows, table.capacity), position[0])
        done = keys[: position[0] // BLOCK_SIZE]
        if is_late:
            self.allocator.pass_by(table, position[0])
        for number, group in enumerate(table.groups):
            for key, block in list(zip(done, group.blocks, strict=False))[group.num_passed :]:
                if (number, key) not in self.contents and self.contents[block] is None:
                    self.contents[block] = number, key
        self.allocator.remember(table, done)
        self.allocator.pass_by(table, position[0])
        assert table.passes_next is not None
        assert table.passes_next > position[0]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        self.allocator.close_table(self.sequences.pop(index).table)

    @invariant()
    def every_block_is_free_known_or_held(self) -> None:
        self.allocator.check([s.table for s in self.sequences])
        self.allocator.check_prefixes()

    @invariant()
    def a_table_holds_what_its_next_row_sees_and_no_more_than_its_window_allows(self) -> None:
        for table, _, (position,) in self.sequences:
            for group in table.groups:
                pairs = zip(group.held, group.held[1:], strict=False)
                assert group.contiguous == all(b == a + 1 for a, b in pairs)
                if group.window is None:
                    assert group.num_passed == 0
                    continue
                lowest = max(position - group.window.size + 1, 0)
                assert group.num_passed == lowest // BLOCK_SIZE
                assert len(group.held) <= group.window.max_blocks

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.allocator.close_table(sequence.table)
        self.allocator.check([])


TestAllocation = Allocation.TestCase
TestStackAllocation = StackAllocation.TestCase
TestWindowedAllocation = WindowedAllocation.TestCase
TestWindowedAllocation.settings = settings(max_examples=60, stateful_step_count=20)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
    st.integers(1, 11),
)
def test_free_ranges_are_a_set_of_blocks(changes: list[tuple[bool, int]], length: int) -> None:
    ranges, blocks = FreeRanges(10), set(range(10))
    for adds, block in changes:
        if adds == (block in blocks):  # would be our own mistake
            with pytest.raises(AssertionError, match=f"block {block} is"):
                (ranges.add if adds else ranges.remove)(block)
            continue
        (ranges.add if adds else ranges.remove)(block)
        (blocks.add if adds else blocks.remove)(block)
    assert ranges.size == len(blocks)
    assert {b for b in range(-1, 12) if b in ranges} == blocks
    assert [b for r in ranges.ranges for b in r] == sorted(blocks)
    assert all(b.start > a.stop for a, b in zip(ranges.ranges, ranges.ranges[1:], strict=False))
    assert ranges.lowest == min(blocks, default=None)
    runs = (range(s, s + length) for s in range(10))
    assert ranges.first_run(length) == next((r for r in runs if blocks.issuperset(r)), range(0))


def test_a_stack_reserves_nothing_and_hands_out_what_came_back_last() -> None:
    allocator = BlockAllocator(6, 1, contiguous=False)
    first, second = allocator.open_table(6), allocator.open_table(6)
    assert first.reserved == second.reserved == range(0)
    assert allocator.grow(first, 2)
    assert allocator.grow(second, 2)
    assert (first.blocks, second.blocks) == ([0, 1], [2, 3])
    assert allocator.grow(first, 3)
    assert not first.contiguous
    allocator.close_table(second)
    third = allocator.open_table(6)
    assert allocator.grow(third, 3)
    assert third.blocks == [2, 3, 5]
    assert not allocator.grow(first, 4)


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_time_of_a_block_does_not_grow_with_the_number_of_blocks(contiguous: bool) -> None:
    """Counted in steps of Python, not in seconds."""
    assert _lines_run(100_000, contiguous) <= 1.2 * _lines_run(1_000, contiguous)


def _lines_run(num_blocks: int, contiguous: bool) -> int:
    """Lines that serve 30 tables of 20 blocks each, beside each other and beyond their ranges."""
    allocator = BlockAllocator(num_blocks, 1, contiguous)
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        tables = [allocator.open_table(5) for _ in range(30)]
        for length in range(1, 21):
            for table in tables:
                allocator.grow(table, length)
        for table in tables[::2]:
            allocator.close_table(table)
        allocator.check(tables[1::2])
    finally:
        sys.settrace(before)
    return lines


def test_tables_that_fit_grow_side_by_side_in_one_piece_each() -> None:
    allocator = BlockAllocator(10, 1)
    first, second = allocator.open_table(5), allocator.open_table(5)
    for length in range(1, 6):
        assert allocator.grow(first, length)
        assert allocator.grow(second, length)
    assert first.blocks == [0, 1, 2, 3, 4]
    assert second.blocks == [5, 6, 7, 8, 9]
    assert first.contiguous
    assert second.contiguous


def test_a_reservation_is_taken_by_others_only_when_nothing_else_is_free() -> None:
    allocator = BlockAllocator(6, 1)
    owner = allocator.open_table(4)
    assert allocator.grow(owner, 1)
    other = allocator.open_table(4)  # no range of four is left: it takes what it can
    assert other.reserved == range(0)
    assert allocator.grow(other, 2)
    assert other.blocks == [4, 5]
    assert allocator.grow(other, 3)
    assert other.blocks == [4, 5, 1]
    assert not other.contiguous
    assert allocator.grow(owner, 2)
    assert owner.blocks == [0, 2]
    assert not owner.contiguous


def test_a_table_that_outgrows_its_range_leaves_the_next_ones_alone() -> None:
    allocator = BlockAllocator(8, 1)
    first, second = allocator.open_table(2), allocator.open_table(3)
    assert allocator.grow(first, 3)
    assert first.blocks == [0, 1, 5]
    assert allocator.grow(second, 3)
    assert second.blocks == [2, 3, 4]
    assert second.contiguous


def test_a_table_without_a_range_takes_the_blocks_behind_its_last_one() -> None:
    allocator = BlockAllocator(num_blocks=8, block_size=1)
    first, long = allocator.open_table(2), allocator.open_table(7)
    assert long.reserved == range(0)  # no free range is that long
    assert allocator.grow(first, 2)
    assert allocator.grow(long, 1)
    allocator.close_table(first)  # blocks before it are free again
    assert allocator.grow(long, 4)
    assert long.blocks == [2, 3, 4, 5]


def test_a_closed_reservation_can_be_reserved_again() -> None:
    allocator = BlockAllocator(4, 1)
    for _ in range(3):
        table = allocator.open_table(4)
        assert table.reserved == range(4)
        assert allocator.grow(table, 2)
        allocator.close_table(table)
    assert allocator.num_free == 4


@given(st.integers(1, 50), st.integers(1, 7))
def test_blocks_for_is_the_least_number_that_suffices(num_tokens: int, block_size: int) -> None:
    blocks = BlockAllocator(1, block_size).blocks_for(num_tokens)
    assert (blocks - 1) * block_size < num_tokens <= blocks * block_size


def test_growing_in_vain_takes_nothing() -> None:
    allocator = BlockAllocator(3, 2)
    table = allocator.open_table(2)
    assert allocator.grow(table, 3)
    assert not allocator.grow(table, 7)
    assert len(table.blocks) == 2
    assert allocator.num_free == 1


@pytest.mark.parametrize("contiguous", [True, False])
def test_freeing_twice_and_losing_blocks_are_noticed(contiguous: bool) -> None:
    allocator = BlockAllocator(3, 2, contiguous)
    table = allocator.open_table(2)
    assert allocator.grow(table, 2)
    with pytest.raises(AssertionError, match="a block is lost"):
        allocator.check([])
    with pytest.raises(AssertionError, match="held by others"):
        allocator.check([table, table])
    stale = BlockTable(2, range(0))
    stale.append(table.blocks[0])
    allocator.close_table(stale)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.close_table(table)

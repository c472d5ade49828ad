"""What the host knows of all slots, as columns: a step's arithmetic is a few array operations.

The host may launch steps before it has read the last ones. Then it knows a request's position
only as a range: at least one token per step in flight, at most K + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from peagle.speculation.statistics import SpecDecodeStats

Column = NDArray[np.int64]

NEVER = 1 << 62  # a position that no request has


class HostBatch:
    def __init__(self, num_slots: int, max_drafts: int) -> None:
        def column() -> Column:
            return np.zeros(num_slots, dtype=np.int64)

        self.serials = column()  # number of the request in it, by order of admission; 0: free
        self.decodes = column()  # 1: its prompt has been launched
        self.limits = column()  # tokens at which the request ends, prompt included
        self.max_capacity = column()  # positions that its blocks may have at most
        self.capacity = column()  # tokens that its blocks hold
        self.passes_next = column() + NEVER  # from which position on a window has passed a block
        self.per_step = column()  # tokens that a step may give: K + 1
        self.num_rows = column()  # rows that it computes: the same, or those of a tree
        self.draft_rows = column()  # that its drafts take behind them in the drafter's cache
        self.sampling = column()  # an index of SAMPLINGS
        self.needs_host = column()  # 1: its logits are changed or read on the host
        self.ends_early = column()  # 1: it has ends of its own beside the engine's
        self.num_computed = column()  # what the last report read leaves computed on the device
        self.in_flight = column()  # steps launched and not read
        size = max_drafts + 1
        self.offered = column()  # drafts that it may have had since `take_outcomes`
        self.expected = np.zeros(num_slots)  # those that were expected to be accepted
        # [slot, drafted, kept, whether a tree's path ended in a leaf]
        self.outcomes = np.zeros((num_slots, size, size, 2), dtype=np.int64)

    def ready(self) -> NDArray[np.bool_]:
        """Slots whose prompt is done, and which the steps in flight are not sure to end."""
        continues: NDArray[np.bool_] = self.num_computed + 1 + self.in_flight < self.limits
        return continues & (self.decodes > 0)

    def start(self, slots: Column | slice = slice(None)) -> Column:
        """The highest position at which the next step may begin."""
        highest: Column = self.num_computed[slots] + self.in_flight[slots] * self.per_step[slots]
        return highest

    def reach(self, slots: Column | slice = slice(None)) -> Column:
        """Positions that one more step may write: its own rows, and behind those that it may
        commit the rows of the drafts for the step after it."""
        ahead = self.draft_rows[slots]
        most = np.maximum(self.per_step[slots] + ahead, self.num_rows[slots])
        end: Column = self.start(slots) + most
        return np.minimum(end, self.max_capacity[slots])

    def clear(self, slot: int) -> None:
        for column in (self.serials, self.decodes, self.limits, self.capacity, self.max_capacity):
            column[slot] = 0
        for column in (self.num_computed, self.in_flight, self.needs_host):
            column[slot] = 0
        self.passes_next[slot] = NEVER

    def take_outcomes(self, slot: int, stats: SpecDecodeStats) -> None:
        """Adds the steps since it was last asked."""
        counts, depth = self.outcomes[slot], int(self.per_step[slot]) - 1
        outcomes = np.argwhere(counts)
        times = counts[tuple(outcomes.T)].tolist()
        for (drafted, kept, is_leaf), number in zip(outcomes.tolist(), times, strict=True):
            stats.observe(drafted, kept, number, depth, is_leaf=bool(is_leaf))
        stats.num_offered_tokens += int(self.offered[slot])
        stats.num_expected_tokens += float(self.expected[slot])
        counts[:] = self.offered[slot] = self.expected[slot] = 0

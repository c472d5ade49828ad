"""What the host knows of all lanes, as columns: a step's arithmetic is a few array operations.

The host launches steps before it has read the last ones, so it knows a lane's position only as a
range: at least one token per step in flight, at most K + 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.int64]


class LaneTable:
    def __init__(self, num_lanes: int, max_drafts: int) -> None:
        def column() -> NDArray[np.int64]:
            return np.zeros(num_lanes, dtype=np.int64)

        self.serials = column()  # number of the request in it, by order of admission; 0: free
        self.limits = column()  # tokens at which the request ends, prompt included
        self.capacity = column()  # tokens that its blocks hold
        self.per_step = column()  # tokens that a step may give: K + 1
        self.sampling = column()  # an index of SAMPLINGS
        self.ends_early = column()  # 1: it has ends of its own beside the engine's
        self.num_computed = column()  # what the last report read leaves computed on the device
        self.in_flight = column()  # decode steps launched and not read
        size = max_drafts + 1
        self.outcomes = np.zeros((num_lanes, size, size), dtype=np.int64)  # [lane, drafted, kept]

    def ready(self) -> NDArray[np.bool_]:
        """Lanes whose prompt is done, and which the steps in flight are not sure to end."""
        going = self.num_computed + 1 + self.in_flight < self.limits
        return going & (self.num_computed > 0)

    def reach(self, lanes: Lanes | slice = slice(None)) -> NDArray[np.int64]:
        """Tokens that the caches may hold after one more decode step."""
        steps = self.in_flight[lanes] + 1
        return np.minimum(
            self.num_computed[lanes] + steps * self.per_step[lanes], self.limits[lanes]
        )

    def clear(self, lane: int) -> None:
        for name in ("serials", "limits", "capacity", "num_computed", "in_flight"):
            getattr(self, name)[lane] = 0

    def take_outcomes(self, lane: int) -> list[tuple[int, int, int]]:
        """(drafted, kept, times) of the steps since it was last asked."""
        counts = self.outcomes[lane]
        drafted, kept = np.nonzero(counts)
        times = counts[drafted, kept]
        counts[:] = 0
        return list(zip(drafted.tolist(), kept.tolist(), times.tolist(), strict=True))

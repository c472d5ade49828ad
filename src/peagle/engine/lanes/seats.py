"""Who sits in which lane, and which blocks they hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from peagle.engine.blocks import BlockAllocator
from peagle.engine.lanes.clock import DeviceClock, Shares
from peagle.engine.lanes.shapes import SAMPLINGS, sampling_of
from peagle.engine.lanes.table import Lanes, LaneTable
from peagle.engine.request import Request, Status

# Blocks taken ahead while there are plenty, so that the host does it less often: most answers get
# all of theirs when they are seated, and the device is told once.
BLOCKS_AHEAD = 16


@dataclass(eq=False)
class Seat:
    """A request in a lane. What changes with every step is in the table."""

    request: Request
    lane: int
    serial: int
    length: int  # tokens known when it was seated: the prompt, or more after preemption
    num_prefilled: int = 0  # of these, how many were launched
    num_written_blocks: int = 0  # how much of its block table the device has
    closed: bool = False  # ended or preempted: reports still in flight are not for it
    began: Shares | None = None  # the clock when its first token was read


class Seating:
    """First come, first served; the youngest is sent back when blocks run out."""

    def __init__(
        self,
        allocator: BlockAllocator,
        num_lanes: int,
        max_drafts: int,
        eos_token_ids: frozenset[int],
        clock: DeviceClock,
    ) -> None:
        self.allocator, self.clock = allocator, clock
        self.table = LaneTable(num_lanes, max_drafts)
        self.waiting: deque[Request] = deque()
        self.seats: dict[int, Seat] = {}  # by lane, in order of admission
        self.prompting: list[Seat] = []  # those with prompt rows that were not launched
        self._eos_token_ids = eos_token_ids
        self._num_admitted = 0
        self._free_lanes = list(range(num_lanes))[::-1]

    def seat_of(self, request: Request) -> Seat | None:
        return next((s for s in self.seats.values() if s.request is request), None)

    @property
    def num_decoding(self) -> int:
        return int(self.table.ready().sum())

    def admit(self) -> None:
        """Seats waiting requests while a lane and blocks for all their known tokens are free."""
        seated = []
        while self.waiting and self._free_lanes:
            request = self.waiting[0]
            expected = request.num_tokens + request.num_speculative_tokens + 2
            limit = len(request.prompt_token_ids) + request.max_tokens
            table = self.allocator.open_table(limit)
            if not self.allocator.grow(table, min(expected, limit)):
                self.allocator.close_table(table)
                break
            self.waiting.popleft()
            request.table, request.status = table, Status.RUNNING
            seated.append(self._sit(request, limit))
        for seat in seated:
            self._grow(seat, 0)

    def _grow(self, seat: Seat, num_tokens: int) -> bool:
        """Room for so many tokens and, if there is plenty, for some more. False: not even for
        these."""
        blocks, limit = seat.request.table, int(self.table.limits[seat.lane])
        assert blocks is not None
        needed = max(num_tokens, blocks.capacity)
        wishes = (needed + self._tokens_ahead(), needed)
        has_grown = any(self.allocator.grow(blocks, min(wish, limit)) for wish in wishes)
        self.table.capacity[seat.lane] = blocks.capacity
        return has_grown

    def _tokens_ahead(self) -> int:
        """None while somebody waits for blocks. If all took as many, most free ones would be
        left."""
        if self.waiting and self._free_lanes:
            return 0
        share = self.allocator.num_free // (4 * len(self.seats))
        return min(share, BLOCKS_AHEAD) * self.allocator.block_size

    def _sit(self, request: Request, limit: int) -> Seat:
        self._num_admitted += 1
        seat = Seat(request, self._free_lanes.pop(), self._num_admitted, request.num_tokens)
        table, lane = self.table, seat.lane
        assert request.table is not None
        table.serials[lane] = seat.serial
        table.limits[lane] = limit
        table.capacity[lane] = request.table.capacity
        table.per_step[lane] = request.num_speculative_tokens + 1
        table.sampling[lane] = SAMPLINGS.index(sampling_of([request.params]))
        table.ends_early[lane] = not request.stop_token_ids <= self._eos_token_ids
        request.take_outcomes = partial(table.take_outcomes, lane)
        self.seats[lane] = seat
        self.prompting.append(seat)
        return seat

    def make_room_for_step(self) -> list[Seat]:
        """Blocks for one more step of all that decode; may send the youngest seats back.
        -> those that have got some."""
        table = self.table
        short = np.flatnonzero(table.ready() & (table.reach() > table.capacity))
        seats = sorted((self.seats[lane] for lane in short.tolist()), key=lambda s: s.serial)
        for seat in seats:
            self.make_room(seat)
        return [seat for seat in seats if not seat.closed]

    def make_room(self, seat: Seat) -> None:
        """Blocks for one more step of this seat, unless it is sent back itself."""
        reach = int(self.table.reach(slice(seat.lane, seat.lane + 1))[0])
        while not seat.closed and not self._grow(seat, reach):
            self._send_back(next(reversed(self.seats.values())))

    def ready_lanes(self) -> Lanes:
        return np.flatnonzero(self.table.ready())

    def close(self, seat: Seat) -> None:
        """Frees the lane and the blocks. What is in flight still runs before whoever comes next."""
        assert not seat.closed
        request = seat.request
        stats = request.stats  # with the outcomes that the table has
        request.take_outcomes = None
        if seat.began is not None:
            self.clock.shares.add_to(stats, since=seat.began)
        seat.closed = True
        del self.seats[seat.lane]
        if seat in self.prompting:
            self.prompting.remove(seat)
        self.table.clear(seat.lane)
        self._free_lanes.append(seat.lane)
        if request.table is not None:
            self.allocator.close_table(request.table)
            request.table = None

    def _send_back(self, seat: Seat) -> None:
        """Tokens in flight are lost and computed again: the same, or, by rejection, others of the
        same law, for nobody has read them."""
        self.close(seat)
        seat.request.forget_computation()
        self.waiting.appendleft(seat.request)

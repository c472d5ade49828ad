"""The host's side of the lanes: who sits where, which blocks they hold, what is in flight.

The host launches steps before it has read the last ones, so it knows a lane's position only as a
range: at least one token per step in flight, at most K + 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.blocks import BlockAllocator
from peagle.engine.lanes.clock import DeviceClock, Shares
from peagle.engine.request import Request, Status


@dataclass(eq=False)
class Seat:
    request: Request
    lane: int
    limit: int  # tokens at which the request ends, prompt included
    length: int  # tokens known when it was seated: the prompt, or more after preemption
    capacity: int  # tokens that its blocks hold
    num_prefilled: int = 0  # of these, how many were launched
    num_computed: int = 0  # what the last report read leaves computed on the device
    in_flight: int = 0  # decode steps launched and not read
    num_written_blocks: int = 0  # how much of its table the device has
    closed: bool = False  # ended or preempted: reports still in flight are not for it
    began: Shares | None = None  # the clock when its first token was read

    @property
    def may_go_on(self) -> bool:
        """Its prompt is done, and the steps in flight are not sure to reach the end."""
        computed = self.num_computed
        return 0 < computed < self.limit - 1 - self.in_flight

    @property
    def reach(self) -> int:
        """Tokens that the cache may hold after one more decode step."""
        per_step = self.request.num_speculative_tokens + 1
        return min(self.num_computed + (self.in_flight + 1) * per_step, self.limit)


class Seating:
    """First come, first served; the youngest is sent back when blocks run out."""

    def __init__(self, allocator: BlockAllocator, num_lanes: int, clock: DeviceClock) -> None:
        self.allocator, self.clock = allocator, clock
        self.waiting: deque[Request] = deque()
        self.seats: list[Seat] = []  # in order of admission
        self._free_lanes = list(range(num_lanes))[::-1]

    def seat_of(self, request: Request) -> Seat | None:
        return next((s for s in self.seats if s.request is request), None)

    @property
    def decodes(self) -> bool:
        return any(seat.may_go_on for seat in self.seats)

    def admit(self) -> list[Seat]:
        """Seats waiting requests while a lane and blocks for all their known tokens are free."""
        admitted: list[Seat] = []
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
            lane, length = self._free_lanes.pop(), request.num_tokens
            seat = Seat(request, lane, limit, length, table.capacity)
            self.seats.append(seat)
            admitted.append(seat)
        return admitted

    def make_room_for_step(self) -> list[Seat]:
        """Blocks for one more step of all that decode; may send the youngest seats back.
        -> those that have got some."""
        short = [s for s in self.seats if s.may_go_on and s.reach > s.capacity]
        for seat in short:
            self.make_room(seat)
        return [s for s in short if not s.closed]

    def make_room(self, seat: Seat) -> None:
        """Blocks for one more step of this seat, unless it is sent back itself."""
        while not seat.closed:
            table = seat.request.table
            assert table is not None
            if self.allocator.grow(table, seat.reach):
                seat.capacity = table.capacity
                return
            self._send_back(self.seats[-1])

    def ready(self) -> Sequence[Seat]:
        return [s for s in self.seats if s.may_go_on]

    def close(self, seat: Seat) -> None:
        """Frees the lane and the blocks. What is in flight still runs before whoever comes next."""
        assert not seat.closed
        seat.closed = True
        self.seats.remove(seat)
        self._free_lanes.append(seat.lane)
        if seat.began is not None:
            self.clock.shares.add_to(seat.request.stats, since=seat.began)
        if seat.request.table is not None:
            self.allocator.close_table(seat.request.table)
            seat.request.table = None

    def _send_back(self, seat: Seat) -> None:
        """Tokens in flight are lost and computed again: the same, or, by rejection, others of the
        same law, for nobody has read them."""
        self.close(seat)
        seat.request.forget_computation()
        self.waiting.appendleft(seat.request)

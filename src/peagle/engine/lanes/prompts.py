"""Prompts computed beside decoding: one prefill step at a time, on a queue of its own.

Decode steps of few rows leave most of a GPU idle, and so does a short prompt: side by side they
take little more than one of them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.engine.lanes.choosing import Sampling
from peagle.engine.lanes.graphs import Report, Steps
from peagle.engine.lanes.prefill import Chunk, next_chunks, prefill_inputs
from peagle.engine.lanes.seats import Seat, Seating
from peagle.engine.lanes.shapes import padded, sampling_of
from peagle.engine.lanes.steps import PREFILL_ITEM, PrefillShape
from peagle.engine.lanes.uploads import write_blocks

# How long prompts take beside decode steps, in rows: a prefill step of R rows as long as
# (700 + R) / (330 + 0.8 D) decode steps of D rows. Reckoned from both kinds of steps of a small
# target on an H200, on the long side: where a lane joins too early, all others wait for its
# prompt. By count and not by clock, so that the same requests always meet in the same batches.
PREFILL_START, DECODE_START, DECODE_ROW = 700, 330, 0.8
# A prefill step slows the decode steps beside it, as it seems whatever its size, so prompts gather
# for a few steps, unless they are many: a lane that waits for its prompt gives nothing either.
PATIENCE = 4
MANY = 1 / 8  # of the lanes that decode


@dataclass
class Beside:
    """A prefill step in flight. Its seats take no part in decode steps yet."""

    chunks: Sequence[Chunk]
    report: Report
    steps_left: int  # decode steps until they do

    @property
    def ended(self) -> list[Seat]:
        return [chunk.seat for chunk in self.chunks if chunk.is_final]

    @property
    def must_wait(self) -> bool:
        """A seat was closed, and its blocks are free: whoever gets them must come after this."""
        return any(chunk.seat.closed for chunk in self.chunks)


class Prompts:
    def __init__(
        self,
        steps: Steps,
        seating: Seating,
        max_rows: int,
        by_rejection: Callable[[Sampling], bool],
    ) -> None:
        self.steps, self.seating = steps, seating
        self._by_rejection = by_rejection
        self._max_items = max(max_rows // PREFILL_ITEM, 1)
        self._beside: Beside | None = None
        self._waited = 0  # steps for which prompts have gathered

    def launch(self) -> Beside | None:
        """Starts the next one if it is time. -> the step, joined already, where nothing decodes
        that it could run beside."""
        chunks = [] if self._beside else next_chunks(self.seating.prompting, self._max_items)
        if not chunks or not self._is_time(chunks):
            return None
        # Reports are in the order of chunks; those that end no prompt have nothing to say.
        finals = [c.is_final for c in chunks]
        assert all(finals[:-1]), "only the last chunk may leave a prompt unfinished"
        self._beside = Beside(chunks, self._start(chunks), self._steps_beside(chunks))
        return None if self.seating.num_decoding else self._join()

    def _steps_beside(self, chunks: Sequence[Chunk]) -> int:
        table = self.seating.table
        num_decoded = int(table.per_step[table.ready()].sum())
        num_rows = sum(c.num_items for c in chunks) * PREFILL_ITEM
        per_step = DECODE_START + DECODE_ROW * num_decoded
        return math.ceil((PREFILL_START + num_rows) / per_step)

    def _is_time(self, chunks: Sequence[Chunk]) -> bool:
        self._waited += 1
        num_decoding = self.seating.num_decoding
        is_full = sum(c.num_items for c in chunks) == self._max_items
        is_time = self._waited > PATIENCE or is_full or len(chunks) >= MANY * num_decoding
        if is_time:
            self._waited = 0
        return is_time

    def join_in_time(self) -> Beside | None:
        """Once before each step: -> the step in flight if decode steps now come after it."""
        if self._beside is None:
            return None
        self._beside.steps_left -= 1
        is_time = self._beside.steps_left <= 0 or not self.seating.num_decoding
        return self._join() if is_time else self.join_if_it_must()

    def join_if_it_must(self) -> Beside | None:
        return self._join() if self._beside is not None and self._beside.must_wait else None

    def _start(self, chunks: Sequence[Chunk]) -> Report:
        state = self.steps.models.state
        write_blocks(state, [c.seat for c in chunks])
        num_items = padded(sum(c.num_items for c in chunks))
        sampling = sampling_of(c.seat.request.params for c in chunks if c.is_final)
        shape = PrefillShape(num_items, sampling, self._by_rejection(sampling))
        report = self.steps.prefill(shape, prefill_inputs(chunks, num_items, state.dummy))
        for chunk in chunks:
            if chunk.is_final:
                self.seating.prompting.remove(chunk.seat)
            chunk.seat.num_prefilled += chunk.count
        return report

    def _join(self) -> Beside:
        """Decode steps from here on come after the prompts, and include them."""
        assert self._beside is not None
        joined, self._beside = self._beside, None
        self.steps.join_prefill()
        for seat in joined.ended:
            if not seat.closed:
                self.seating.table.num_computed[seat.lane] = seat.length
        return joined

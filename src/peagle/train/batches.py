"""Packed rows in a seeded order, planned by a thread ahead of the step.

Everything about row i of epoch e follows from (seed, e, i), so a resumed run continues with the
very rows and draws that it would have seen.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from peagle.data.dataset import Dataset
from peagle.data.packing import assign, pack
from peagle.errors import DataError
from peagle.teacher_forcing.features import FeatureSource, StoredStates
from peagle.teacher_forcing.partition import Shapes
from peagle.train.inputs import Inputs
from peagle.train.planner import Eagle3Planner, PlannedRow, Planner
from peagle.train.recipe import Recipe

MEASURED_ROWS = 6  # packed rows whose drawn size sets the padded one
SPARE = 1.02  # room for rows that draw more than those
MASK_MULTIPLE = 1024
SEGMENT_MULTIPLE = 2048  # rows of a part of a packed row: few sizes, few compilations


class Epoch(NamedTuple):
    number: int
    rows: list[list[int]]  # dataset rows of each packed row


class Batches:
    """Packed rows, numbered through all epochs; process `rank` of `world` takes every world-th."""

    def __init__(
        self,
        dataset: Dataset,
        indices: Sequence[int],
        capacity: int,
        plan: Planner,
        seed: int,
        source: FeatureSource | None,  # None: rows without features
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not indices:
            raise DataError(
                f"{dataset.folder} has no rows left to train on",
                hint="lower data.held_out_share or prepare more rows",
            )
        self.dataset, self.indices, self.capacity = dataset, list(indices), capacity
        self.plan, self.seed, self.source = plan, seed, source
        self.rank, self.world = rank, world

    def epoch(self, number: int) -> Epoch:
        """A new order and a new packing each time; a tail that does not fill all ranks is left."""
        generator = self._generator(number, -1)
        order = torch.randperm(len(self.indices), generator=generator).tolist()
        shuffled = [self.indices[i] for i in order]
        lengths = self.dataset.lengths[shuffled].tolist()
        packed = assign(lengths, self.capacity)
        order = torch.randperm(len(packed), generator=generator).tolist()
        rows = [[shuffled[item] for item in packed[i]] for i in order]
        usable = max(len(rows) // self.world, 1) * self.world
        while len(rows) < usable:  # fewer packed rows than processes: repeat
            rows.append(rows[0])
        return Epoch(number, rows[:usable])

    def rows_from(self, start: int) -> Iterator[PlannedRow]:
        """This process's planned rows from its `start`-th on, without end."""
        number, skip = 0, start
        while True:
            epoch = self.epoch(number)
            count = len(epoch.rows) // self.world
            for index in range(min(skip, count), count):
                yield self._planned(epoch, index * self.world + self.rank)
            skip = max(skip - count, 0)
            number += 1

    def _planned(self, epoch: Epoch, index: int) -> PlannedRow:
        row = pack(self.dataset, epoch.rows[index], self.capacity)
        planned = self.plan(row, self._generator(epoch.number, index))
        fetched = None if self.source is None else self.source.fetch(row)
        return planned._replace(fetched=fetched)

    def _generator(self, epoch: int, index: int) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed} {epoch} {index}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def draw_rows(inputs: Inputs, planner: Planner) -> list[PlannedRow]:
    """The first packed rows of a run, without features."""
    recipe = inputs.recipe
    capacity, seed = recipe.data.tokens_per_row, recipe.run.seed
    batches = Batches(inputs.dataset, inputs.train, capacity, planner, seed, source=None)
    drawn = list(islice(batches.rows_from(0), MEASURED_ROWS))
    if not any(row.weight for row in drawn):
        raise DataError(
            f"the first rows of {inputs.dataset.folder} have no token to learn from",
            hint="is data.tokens_per_row shorter than the prompts, or the loss mask 0?",
        )
    return drawn


def measure_shapes(drawn: list[PlannedRow], planner: Planner, recipe: Recipe) -> Shapes:
    """Room for the mask rows of nearly every packed row, so that compiled code sees one shape."""
    if isinstance(planner, Eagle3Planner):
        return Shapes(loss_row_multiple=recipe.loss.chunk_rows)
    most = max(sum(s.num_masks for s in p.segments) for p in drawn)
    max_masks = -(-int(most * SPARE) // MASK_MULTIPLE) * MASK_MULTIPLE
    partitioned = planner.num_segments > 1 or planner.max_rows is not None
    whole = SEGMENT_MULTIPLE if partitioned else recipe.data.tokens_per_row + max_masks
    return Shapes(max_masks, row_multiple=whole, loss_row_multiple=recipe.loss.chunk_rows)


class Prefetch:
    """Runs an iterator in a thread, a few items ahead, and passes its errors on."""

    def __init__(self, items: Iterator[PlannedRow], depth: int, *, pin: bool) -> None:
        self._items, self._pin = items, pin
        self._queue: queue.Queue[PlannedRow | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def __next__(self) -> PlannedRow:
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(pinned(item) if self._pin else item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: PlannedRow | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def pinned(planned: PlannedRow) -> PlannedRow:
    """Page-locked copies, so that the transfer to the GPU overlaps with its work."""
    row = planned.row
    row = row._replace(
        token_ids=row.token_ids.pin_memory(),
        document=row.document.pin_memory(),
        position=row.position.pin_memory(),
    )
    fetched = planned.fetched
    if isinstance(fetched, StoredStates):  # promised ones are page-locked already
        fetched = StoredStates(fetched.aux_hidden_states.pin_memory(), fetched.states.pin_memory())
    segments = [s.pin() for s in planned.segments]
    return planned._replace(row=row, segments=segments, fetched=fetched)

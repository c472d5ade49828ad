"""Prompt rows of several seats as the inputs of one prefill step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.lanes.seats import Seat
from peagle.engine.lanes.steps import PREFILL_ITEM, SETTINGS, empty_prefill
from peagle.engine.request import Request

Fields = dict[str, NDArray[np.int64]]  # those of PrefillInputs


@dataclass(frozen=True)
class Chunk:
    """Known tokens first .. first + count - 1 of a seat."""

    seat: Seat
    first: int
    count: int

    @property
    def num_items(self) -> int:
        return -(-self.count // PREFILL_ITEM)

    @property
    def is_final(self) -> bool:
        return self.first + self.count == self.seat.length


def next_chunks(seats: Sequence[Seat], max_items: int) -> list[Chunk]:
    """What fits in one step, the oldest seat first. Only whole items are left for later."""
    chunks = []
    for seat in seats:
        left = seat.length - seat.num_prefilled
        if left > 0 and max_items > 0:
            chunk = Chunk(seat, seat.num_prefilled, min(left, max_items * PREFILL_ITEM))
            chunks.append(chunk)
            max_items -= chunk.num_items
    return chunks


def prefill_inputs(chunks: Sequence[Chunk], num_items: int, dummy_lane: int) -> Tensor:
    """One int64 tensor in the order of PrefillInputs, padded to `num_items`."""
    packed, tensors = empty_prefill(num_items, dummy_lane)
    # The same memory, quicker to write to.
    fields = {name: tensor.numpy() for name, tensor in tensors._asdict().items()}
    settings = fields["final_settings"].reshape(len(SETTINGS), num_items)
    item = 0
    for n, chunk in enumerate(chunks):
        _fill(fields, chunk, item)
        if chunk.is_final:
            fields["final_rows"][n] = item * PREFILL_ITEM + chunk.count - 1
            fields["final_lanes"][n] = chunk.seat.lane
            fields["final_lengths"][n] = chunk.seat.length
            settings[:, n] = _settings(chunk.seat.request)
        item += chunk.num_items
    return packed


def _settings(request: Request) -> list[int]:
    """In the order of SETTINGS."""
    params, num_prompt = request.params, len(request.prompt_token_ids)
    temperature = 0.0 if params.greedy else params.temperature
    fractions = np.array([temperature, params.top_p, params.min_p], dtype=np.float32)
    return [
        num_prompt + request.max_tokens,
        num_prompt,
        request.num_speculative_tokens,
        max(params.top_k, 0),
        request.seed,
        *fractions.view(np.int32).tolist(),
    ]


def _fill(fields: Fields, chunk: Chunk, item: int) -> None:
    tokens = chunk.seat.request.token_ids
    row, end = item * PREFILL_ITEM, chunk.first + chunk.count
    fields["token_ids"][row : row + chunk.count] = tokens[chunk.first : end]
    known = tokens[chunk.first + 1 : end + 1]  # one fewer where the prompt ends
    fields["next_ids"][row : row + len(known)] = known
    items = slice(item, item + chunk.num_items)
    offsets = np.arange(chunk.num_items) * PREFILL_ITEM
    fields["lanes"][items] = chunk.seat.lane
    fields["starts"][items] = chunk.first + offsets
    fields["counts"][items] = np.minimum(chunk.count - offsets, PREFILL_ITEM)
    fields["draft_counts"][items] = np.clip(len(known) - offsets, 0, PREFILL_ITEM)

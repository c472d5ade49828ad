"""What the host tells the device about a lane: its request's settings, and new blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.lanes.seats import Seat
from peagle.kernels.lane_state import LaneState


def open_lanes(state: LaneState, seats: Sequence[Seat]) -> None:
    """Settings of newly seated requests. Their positions follow when their prompt is done."""
    if not seats:
        return
    requests = [seat.request for seat in seats]
    integers = [
        [seat.lane for seat in seats],
        [len(r.prompt_token_ids) + r.max_tokens for r in requests],
        [len(r.prompt_token_ids) for r in requests],
        [r.num_speculative_tokens for r in requests],
        [max(r.params.top_k, 0) for r in requests],
        [r.seed for r in requests],
    ]
    floats = [
        [0.0 if r.params.greedy else r.params.temperature for r in requests],
        [r.params.top_p for r in requests],
        [r.params.min_p for r in requests],
    ]
    device = state.limits.device
    lanes, limits, num_prompt, wanted, top_k, seeds = _to(device, torch.tensor(integers))
    temperature, top_p, min_p = _to(device, torch.tensor(floats, dtype=torch.float32))
    state.limits[lanes] = limits
    state.num_prompt[lanes] = num_prompt
    state.wanted_drafts[lanes] = wanted
    state.top_k[lanes] = top_k
    state.seeds[lanes] = seeds
    state.temperature[lanes] = temperature
    state.top_p[lanes] = top_p
    state.min_p[lanes] = min_p


def write_blocks(state: LaneState, seats: Sequence[Seat]) -> None:
    """Brings the device's block tables up to date with the blocks that seats have gained."""
    new = []
    for seat in seats:
        table = seat.request.table
        assert table is not None
        for column in range(seat.num_written_blocks, len(table.blocks)):
            new.append((seat.lane, column, table.blocks[column]))
        seat.num_written_blocks = len(table.blocks)
    if new:
        lanes, columns, blocks = _to(state.limits.device, torch.tensor(new).t().contiguous())
        state.block_tables[lanes, columns] = blocks.int()


def _to(device: torch.device, host: Tensor) -> Tensor:
    """Without waiting, where the device is another."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

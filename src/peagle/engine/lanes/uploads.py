"""What the host tells the device beside the inputs of steps: which blocks lanes have gained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.lanes.seats import Seat
from peagle.kernels.lane_state import LaneState


def write_blocks(state: LaneState, seats: Sequence[Seat]) -> None:
    """Brings the device's block tables up to date with the blocks that seats have gained."""
    new: list[list[int]] = [[], [], []]  # lanes, columns, blocks
    for seat in seats:
        table = seat.request.table
        assert table is not None
        gained = table.blocks[seat.num_written_blocks :]
        new[0] += [seat.lane] * len(gained)
        new[1] += range(seat.num_written_blocks, len(table.blocks))
        new[2] += gained
        seat.num_written_blocks = len(table.blocks)
    if new[0]:
        lanes, columns, blocks = _to(state.limits.device, torch.tensor(new))
        state.block_tables[lanes, columns] = blocks.int()


def _to(device: torch.device, host: Tensor) -> Tensor:
    """Without waiting, where the device is another."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

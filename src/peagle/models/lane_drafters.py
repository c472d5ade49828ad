"""The drafters as static steps: fixed shapes and no question to the host, for CUDA graphs.

They run the same networks over the same rows as `propose`; only the number of rows is fixed, and
rows beyond a lane's own count are computed for nothing. Shapes: B lanes, P pending rows at most,
K draft tokens, C tapped width, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.kernels.step_ops import StepOps
from peagle.models.attention import Attention
from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.output import OutputRows
from peagle.models.p_eagle import PEagleDrafter, target_ids


class PendingRows(NamedTuple):
    """What the drafter has not seen of each lane, and what it is asked for."""

    tokens: Tensor  # [B, P] the token at p + 1 of each row p
    taps: Tensor  # [B * P, C]
    starts: Tensor  # [B] position of the first row
    num_pending: Tensor  # [B]
    num_rows: Tensor  # [B] pending rows and the mask rows that the lane needs behind them


class RowsAttend(Protocol):
    def __call__(
        self, starts: Tensor, counts: Tensor, rows_per_lane: int
    ) -> tuple[Attention, Tensor]:
        """Attention for `rows_per_lane` rows of each lane, `counts` of them real, from `starts`
        on; and the rows' positions."""
        ...


class RowsChoose(Protocol):
    def __call__(self, output: OutputRows, first_depth: int) -> Tensor:
        """B * n rows, of drafts first_depth .. first_depth + n - 1 -> tokens [B, n]."""
        ...


@dataclass(frozen=True)
class LaneDraftBatch:
    pending: PendingRows
    depth: int  # K
    attend: RowsAttend
    choose: RowsChoose
    ops: StepOps


class LaneDrafter(Protocol):
    def propose(self, batch: LaneDraftBatch) -> Tensor:
        """Draft tokens [B, K], in the target's ids."""
        ...

    def feed(
        self, token_ids: Tensor, taps: Tensor, positions: Tensor, attention: Attention
    ) -> None:
        """Runs real rows [N] for the cache alone: a prompt's."""
        ...


class _NetworkLanes:
    network: EagleNetwork

    def feed(
        self, token_ids: Tensor, taps: Tensor, positions: Tensor, attention: Attention
    ) -> None:
        network = self.network
        network(network.embed(token_ids), network.features(taps), positions, attention)

    def _output(self, hidden: Tensor) -> OutputRows:
        return OutputRows(hidden, self.network, target_ids(self.network))


class PEagleLanes(_NetworkLanes):
    """One pass: pending rows, of which the last predicts draft 1, then K - 1 mask rows."""

    def __init__(self, drafter: PEagleDrafter) -> None:
        self.network = drafter.network
        self.mask_feature = drafter.mask_feature

    def propose(self, batch: LaneDraftBatch) -> Tensor:
        network, pending, depth = self.network, batch.pending, batch.depth
        num_rows = pending.tokens.shape[1] + depth - 1
        attention, positions = batch.attend(pending.starts, pending.num_rows, num_rows)
        places = pending.num_pending, network.mask_embedding, num_rows
        embeddings = batch.ops.embed_rows(network.embedding.weight, pending.tokens, *places)
        real = network.features(pending.taps).view(*pending.tokens.shape, -1)
        features = batch.ops.expand_rows(real, pending.num_pending, self.mask_feature, num_rows)
        hidden = network(embeddings, features, positions, attention)
        drafting = batch.ops.pick_rows(hidden, pending.num_pending, num_rows, depth)
        return batch.choose(self._output(drafting), 0)


class Eagle3Lanes(_NetworkLanes):
    """A pass over the pending rows, then one row per lane for each further draft."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.network = drafter.network

    def propose(self, batch: LaneDraftBatch) -> Tensor:
        network, pending = self.network, batch.pending
        width = pending.tokens.shape[1]
        attention, positions = batch.attend(pending.starts, pending.num_pending, width)
        embeddings = self._embed(batch, pending.tokens.flatten())
        features = network.features(pending.taps)
        hidden = network(embeddings, features, positions, attention)
        hidden = batch.ops.pick_rows(hidden, pending.num_pending, width, 1)  # [B, H]
        drafts = [batch.choose(self._output(hidden), 0)]
        starts, counts = self._places(batch)
        for depth in range(1, batch.depth):
            places = starts[depth - 1], counts[depth - 1]
            hidden = self._next(batch, drafts[-1].flatten(), hidden, *places)
            drafts.append(batch.choose(self._output(hidden), depth))
        return torch.cat(drafts, dim=1)

    def _places(self, batch: LaneDraftBatch) -> tuple[Tensor, Tensor]:
        """Position of draft row 1 .. K-1 of each lane, and whether the lane wants it: [K-1, B]."""
        pending = batch.pending
        depths = torch.arange(1, batch.depth, device=pending.starts.device)[:, None]
        starts = pending.starts + pending.num_pending - 1 + depths
        return starts, (pending.num_rows - pending.num_pending >= depths).long()

    def _next(
        self, batch: LaneDraftBatch, tokens: Tensor, states: Tensor, starts: Tensor, counts: Tensor
    ) -> Tensor:
        """One row per lane: a draft's embedding with the state that produced it."""
        network = self.network
        attention, positions = batch.attend(starts, counts, 1)
        features = network.norm(states) if network.config.norm_output else states
        out: Tensor = network(self._embed(batch, tokens), features, positions, attention)
        return out

    def _embed(self, batch: LaneDraftBatch, tokens: Tensor) -> Tensor:
        """[N] -> [N, H]"""
        none = tokens.new_empty(len(tokens), 0)
        return batch.ops.embed_tokens(self.network.embedding.weight, tokens, none)


def lane_drafter(drafter: Drafter) -> LaneDrafter | None:
    """None for a drafter that works on the host."""
    if isinstance(drafter, PEagleDrafter):
        return PEagleLanes(drafter)
    return Eagle3Lanes(drafter) if isinstance(drafter, Eagle3Drafter) else None

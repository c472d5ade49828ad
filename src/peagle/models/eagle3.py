"""EAGLE-3: draft tokens one after the other, each pass fed with the drafter's own last state."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.models.drafter import CacheLayout, DraftBatch, RowItems
from peagle.models.eagle import EagleNetwork
from peagle.models.p_eagle import attend, cache_layout, embed, features_of, run_rows, sample_drafts


class Eagle3Drafter:
    """Draft 1 comes from the last real row; draft i + 1 from one row that pairs draft i's
    embedding with the hidden state that produced it. K drafts take K passes."""

    method = "eagle3"
    max_speculative_tokens = MAX_SPECULATIVE_TOKENS

    def __init__(self, network: EagleNetwork) -> None:
        self.network = network
        self.aux_hidden_state_layers = network.config.aux_hidden_state_layer_ids
        self.cache_layout: CacheLayout | None = cache_layout(network)
        self.max_positions: int | None = network.config.max_position_embeddings

    def propose(self, batch: DraftBatch) -> Tensor:
        hidden = self._real_pass(batch)
        drafts = [sample_drafts(self.network, batch, hidden, 0, 1)]
        starts, counts = _places(batch)
        for depth in range(1, batch.depth):
            items = RowItems(batch.slots, starts[depth - 1], counts[depth - 1], 1)
            hidden = self._draft_pass(batch, items, drafts[-1].flatten(), hidden)
            drafts.append(sample_drafts(self.network, batch, hidden, depth, 1))
        return torch.cat(drafts, dim=1)

    def feed(self, batch: DraftBatch) -> None:
        self._real_pass(batch)

    def _real_pass(self, batch: DraftBatch) -> Tensor:
        """Runs the new real rows and the prompts'; -> each slot's last state [B, H]."""
        width = batch.tokens.shape[1]
        items = RowItems(batch.slots, batch.starts, batch.num_real, width)
        rows = attend(batch, items, batch.prompt)
        embeddings = embed(self.network, batch, batch.tokens.flatten())
        features = features_of(self.network, batch, batch.aux_hidden_states, batch.num_real, width)
        hidden = run_rows(self.network, batch, rows, batch.prompt, embeddings, features)
        return batch.ops.pick_rows(hidden, batch.num_real, width, 1)

    def _draft_pass(
        self, batch: DraftBatch, items: RowItems, tokens: Tensor, states: Tensor
    ) -> Tensor:
        """One row per slot: a draft's embedding with the state that produced it."""
        rows = attend(batch, items, None)
        features = self.network.norm(states) if self.network.config.norm_output else states
        embeddings = embed(self.network, batch, tokens)
        return run_rows(self.network, batch, rows, None, embeddings, features)


def _places(batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """Position of draft row 1 .. K-1 of each slot, and whether the slot wants it: [K-1, B]."""
    depths = torch.arange(1, batch.depth, device=batch.starts.device)[:, None]
    starts = batch.starts + batch.num_real - 1 + depths
    return starts, (batch.num_drafts > depths).long()

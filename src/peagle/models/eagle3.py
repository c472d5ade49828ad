"""EAGLE-3: draft tokens one after the other, each pass fed with the drafter's own last states."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.kernels.device_batch import TreeRows
from peagle.kernels.reference.trees import Candidates
from peagle.models.drafter import CacheLayout, DraftBatch, Packing, RowItems
from peagle.models.eagle import EagleNetwork
from peagle.models.output import OutputRows
from peagle.models.p_eagle import (
    attend,
    cache_layout,
    embed,
    features_of,
    run_rows,
    sample_drafts,
    target_ids,
)
from peagle.speculation import trees
from peagle.speculation.trees import BEAM, Lattice


class Eagle3Drafter:
    """Draft 1 comes from the last real row; draft i + 1 from rows that pair draft i's embedding
    with the hidden state that produced it: one row of a chain, of a tree one for each path of a
    beam. K drafts behind each other take K passes."""

    method = "eagle3"
    max_speculative_tokens = MAX_SPECULATIVE_TOKENS
    max_tree_depth = trees.max_tree_depth(method, MAX_SPECULATIVE_TOKENS)

    def __init__(self, network: EagleNetwork, beam: int = BEAM) -> None:
        self.network, self.rows_per_depth = network, beam
        self.weights_per_row = network.weights_per_row
        self.weights_per_depth = beam * network.weights_per_draft
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

    def lattice(self, batch: DraftBatch) -> Lattice | None:
        """By path: the beam's rows of each depth lie behind those of the depth before, in the
        cache, as a tree whose row 0 is the last real row. Nobody reads them again: the next step's
        real rows begin where they do."""
        states, size = self._real_pass(batch), self.rows_per_depth
        packing = batch.pack_depths(0, 1)
        if not len(packing):
            return None
        levels = [self._candidates(batch, states, packing, 0)]
        beam, num_slots = None, len(batch.slots)
        root = batch.starts + batch.num_real - 1
        depths = torch.arange(1, batch.depth, device=root.device)[:, None, None]
        depths = depths.expand(-1, num_slots, size).contiguous()  # [K-1, B, M]
        parents = root.new_zeros(num_slots, (batch.depth - 1) * size)
        for depth in range(1, batch.depth):
            first_row, width = 1 + (depth - 1) * size, levels[-1].token_ids.shape[1]
            beam = batch.ops.extend_beam(beam, *levels[-1], parents, first_row)
            counts = (batch.num_drafts > depth) * size
            tree = TreeRows(parents, depths[depth - 1], beam.ancestors)
            items = RowItems(batch.slots, root, counts, size, tree, first_row)
            before = batch.ops.path_rows(states, beam.paths, width)
            states = self._draft_pass(batch, items, beam.token_ids.flatten(), before)
            levels.append(self._candidates(batch, states, batch.pack(counts, size), depth))
        square = num_slots, size, size
        tokens = torch.stack([level.token_ids.expand(square) for level in levels], dim=1)
        log_probs = torch.stack([level.log_probs.expand(square) for level in levels], dim=1)
        return Lattice(tokens, log_probs)

    def _candidates(
        self, batch: DraftBatch, states: Tensor, packing: Packing, depth: int
    ) -> Candidates:
        """Behind the rows of one depth.  # [B, 1 or M, M]"""
        assert batch.candidates is not None, "a tree is made of candidates"
        output = OutputRows(packing.take(states), self.network, target_ids(self.network))
        return batch.candidates(output, packing, depth, self.rows_per_depth)

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
        """Rows that pair a draft's embedding with the state that produced it."""
        rows = attend(batch, items, None)
        features = self.network.norm(states) if self.network.config.norm_output else states
        embeddings = embed(self.network, batch, tokens)
        return run_rows(self.network, batch, rows, None, embeddings, features)


def _places(batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """Position of draft row 1 .. K-1 of each slot, and whether the slot wants it: [K-1, B]."""
    depths = torch.arange(1, batch.depth, device=batch.starts.device)[:, None]
    starts = batch.starts + batch.num_real - 1 + depths
    return starts, (batch.num_drafts > depths).long()

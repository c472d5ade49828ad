"""P-EAGLE: K draft tokens in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.reference.trees import Candidates
from peagle.models.drafter import CacheLayout, DraftBatch, Packing, PromptRows, RowItems, Rows
from peagle.models.eagle import EagleNetwork
from peagle.models.output import OutputRows
from peagle.speculation.trees import Lattice, independent

# Mask rows of a step beyond which a correction costs more than it gains: with so many requests
# few nodes of each are verified, and their choice hardly depends on it.
MAX_CORRECTED_ROWS = 512


class PEagleDrafter:
    """Rows of one pass, per slot: the new real rows, the last of which predicts draft 1, then
    K - 1 mask rows, which predict drafts 2..K. Real rows overwrite the cache entries that the
    mask rows of the last step left, before anything can read them."""

    method = "p-eagle"
    rows_per_depth = 1  # a mask row

    def __init__(self, network: EagleNetwork) -> None:
        self.network = network
        self.aux_hidden_state_layers = network.config.aux_hidden_state_layer_ids
        self.cache_layout: CacheLayout | None = cache_layout(network)
        self.max_speculative_tokens = network.config.max_speculative_tokens
        self.max_positions: int | None = network.config.max_position_embeddings
        self.max_tree_depth = self.max_speculative_tokens
        self.weights_per_row = network.weights_per_row
        self.weights_per_depth = network.weights_per_draft
        with torch.no_grad():
            self.mask_feature = network.mask_feature()  # constant once loaded

    def propose(self, batch: DraftBatch) -> Tensor:
        output, packing = self.output(batch)
        if not len(packing):
            return batch.slots.new_zeros(len(batch.slots), batch.depth)
        if self._corrects(batch, output):
            return batch.ops.best_chain(*self._lattice(batch, output, packing))
        return batch.sample(output, 0, packing)

    def _corrects(self, batch: DraftBatch, output: OutputRows) -> bool:
        """A correction has a say where a chain is chosen among candidates: not by rejection, which
        draws each draft from the whole of its distribution, and not where greedy tokens are found
        without logits, for then there are so many rows that it costs more than it gains."""
        without_logits = batch.temperature is None and output.greedy_without_logits
        has_candidates = batch.candidates is not None and not without_logits
        return self.network.correction is not None and has_candidates

    def feed(self, batch: DraftBatch) -> None:
        self._draft_rows(batch)

    def lattice(self, batch: DraftBatch) -> Lattice | None:
        output, packing = self.output(batch)
        return self._lattice(batch, output, packing) if len(packing) else None

    def _lattice(self, batch: DraftBatch, output: OutputRows, packing: Packing) -> Lattice:
        assert batch.candidates is not None, "it is made of candidates"
        candidates = batch.candidates(output, packing)
        return Lattice(candidates.token_ids, self._log_probs(batch, output, packing, candidates))

    def output(self, batch: DraftBatch) -> tuple[OutputRows, Packing]:
        """The rows of drafts 1 .. K, packed."""
        return draft_output(self.network, batch, self._draft_rows(batch), 0, batch.depth)

    def _log_probs(
        self, batch: DraftBatch, output: OutputRows, packing: Packing, candidates: Candidates
    ) -> Tensor:
        network, correction = self.network, self.network.correction
        num_rows = len(batch.slots) * (batch.depth - 1)
        if correction is None or not 0 < num_rows <= MAX_CORRECTED_ROWS:
            return independent(candidates.log_probs)
        normed = packing.put(output.product()[0]).view(len(batch.slots), batch.depth, -1)
        return correction.log_probs(
            normed,
            candidates,
            batch.temperature,
            network.embedding.weight,
            network.output_rows(candidates.token_ids),
        )

    def _draft_rows(self, batch: DraftBatch) -> Tensor:
        """The hidden states that predict drafts 1 .. K.  # [B * K, H]"""
        num_rows = batch.tokens.shape[1] + batch.depth - 1
        items = RowItems(batch.slots, batch.starts, batch.num_rows, num_rows)
        hidden = self._pass(batch, items)
        return batch.ops.pick_rows(hidden, batch.num_real, num_rows, batch.depth)

    def _pass(self, batch: DraftBatch, items: RowItems) -> Tensor:
        """-> hidden states [B * rows_per_item, H]."""
        network, ops = self.network, batch.ops
        rows = attend(batch, items, batch.prompt)
        places = batch.num_real, items.rows_per_item
        embeddings = ops.embed_rows(
            network.embedding.weight, batch.tokens, places[0], network.mask_embedding, places[1]
        )
        real = features_of(
            network, batch, batch.aux_hidden_states, batch.num_real, batch.tokens.shape[1]
        )
        real = real.view(*batch.tokens.shape, real.shape[1])
        features = ops.expand_rows(real, places[0], self.mask_feature, places[1])
        return run_rows(network, batch, rows, batch.prompt, embeddings, features)


def features_of(
    network: EagleNetwork,
    batch: DraftBatch,
    aux_hidden_states: Tensor,
    counts: Tensor,
    rows_per_item: int,
) -> Tensor:
    """Hidden states [I * Q, C] of items with so many real rows [I] -> features [I * Q, H]."""
    packing = batch.pack(counts, rows_per_item)
    return packing.put(network.features(packing.take(aux_hidden_states)))


def attend(batch: DraftBatch, items: RowItems, prompt: PromptRows | None) -> Rows:
    """The rows of a pass. Asked for before their embeddings: on a GPU the layers' first kernel
    reads where its rows go while the kernel before it still runs."""
    return batch.attend([items] if prompt is None else [items, prompt.items])


def run_rows(
    network: EagleNetwork,
    batch: DraftBatch,
    rows: Rows,
    prompt: PromptRows | None,
    embeddings: Tensor,  # [B * Q, H]
    features: Tensor,  # [B * Q, H]
) -> Tensor:
    """One pass over these rows and the prompt's; -> the hidden states [B * Q, H] of these."""
    total = len(embeddings)
    if prompt is not None:
        embeddings = torch.cat((embeddings, embed(network, batch, prompt.tokens)))
        places = prompt.items.counts, prompt.items.rows_per_item
        own = features_of(network, batch, prompt.aux_hidden_states, *places)
        features = torch.cat((features, own))
    if not len(rows.packing):
        return torch.zeros_like(embeddings[:total])
    take = rows.packing.take
    hidden = network(take(embeddings), take(features), rows.positions, rows.attention)
    return rows.packing.put(hidden)[:total]


def embed(network: EagleNetwork, batch: DraftBatch, tokens: Tensor) -> Tensor:
    """[N] -> [N, H]"""
    none = tokens.new_empty(len(tokens), 0)
    return batch.ops.embed_tokens(network.embedding.weight, tokens, none)


def sample_drafts(
    network: EagleNetwork, batch: DraftBatch, hidden: Tensor, first: int, count: int
) -> Tensor:
    """Rows [B * n, H] of drafts first .. first + n - 1 -> tokens [B, n]."""
    output, packing = draft_output(network, batch, hidden, first, count)
    if not len(packing):
        return batch.slots.new_zeros(len(batch.slots), count)
    return batch.sample(output, first, packing)


def draft_output(
    network: EagleNetwork, batch: DraftBatch, hidden: Tensor, first: int, count: int
) -> tuple[OutputRows, Packing]:
    """The same rows before anything is sampled from them."""
    packing = batch.pack_depths(first, count)
    return OutputRows(packing.take(hidden), network, target_ids(network)), packing


def target_ids(network: EagleNetwork) -> Tensor | None:
    return network.target_ids if network.config.reduced_vocabulary else None


def cache_layout(network: EagleNetwork) -> CacheLayout:
    config = network.config
    return CacheLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

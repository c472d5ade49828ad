"""P-EAGLE: K draft tokens in one forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.models.drafter import (
    CacheLayout,
    Draft,
    DraftBatch,
    DraftSequence,
    SequenceDraft,
    Span,
)
from peagle.models.eagle import EagleNetwork


class PEagleDrafter:
    """Rows of one pass, per sequence: the new real rows, the last of which predicts draft 1,
    then K - 1 mask rows, which predict drafts 2..K. Real rows overwrite the cache entries that
    the mask rows of the last step left, before anything can read them."""

    method = "p-eagle"

    def __init__(self, network: EagleNetwork) -> None:
        self.network = network
        self.tap_layers = network.config.aux_hidden_state_layer_ids
        self.cache_layout: CacheLayout | None = cache_layout(network)
        self.max_speculative_tokens = network.config.max_speculative_tokens
        self.max_positions: int | None = network.config.max_position_embeddings
        with torch.no_grad():
            self.mask_feature = network.mask_feature()  # constant once loaded

    def propose(self, batch: DraftBatch) -> Draft:
        spans = [row_span(i, s) for i, s in enumerate(batch.sequences)]
        attention, positions = batch.attend(spans)
        embeddings, features = self._rows(batch)
        hidden = self.network(embeddings, features, positions, attention)

        rows, sequences, depths = drafting_rows(batch, spans)
        if not rows:
            return [SequenceDraft([]) for _ in batch.sequences]
        logits = self.network.logits(hidden[rows])  # [R, Vd]
        choice = batch.choose(logits, sequences, depths, target_ids(self.network))
        counts = [s.num_draft_tokens for s in batch.sequences]
        tokens = split(choice.token_ids.tolist(), counts)
        if choice.probabilities is None:
            return [SequenceDraft(t) for t in tokens]
        laws = torch.split(choice.probabilities, counts)
        return [SequenceDraft(t, law) for t, law in zip(tokens, laws, strict=True)]

    def _rows(self, batch: DraftBatch) -> tuple[Tensor, Tensor]:
        """Embeddings and features [N, H] of all rows, in span order."""
        real_embeddings, real_features = real_rows(self.network, batch)
        counts = [s.token_ids.shape[0] for s in batch.sequences]
        real = zip(
            torch.split(real_embeddings, counts), torch.split(real_features, counts), strict=True
        )
        embeddings, features = [], []
        for sequence, (e, f) in zip(batch.sequences, real, strict=True):
            num_masks = num_mask_rows(sequence)
            embeddings += [e, self.network.mask_embedding.expand(num_masks, -1)]
            features += [f, self.mask_feature.expand(num_masks, -1)]
        return torch.cat(embeddings), torch.cat(features)


def num_mask_rows(sequence: DraftSequence) -> int:
    return max(sequence.num_draft_tokens - 1, 0)


def row_span(index: int, sequence: DraftSequence) -> Span:
    return Span(index, sequence.start, sequence.token_ids.shape[0] + num_mask_rows(sequence))


def drafting_rows(batch: DraftBatch, spans: list[Span]) -> tuple[list[int], list[int], list[int]]:
    """Rows that predict drafts, and the sequence and the depth of each."""
    rows: list[int] = []
    sequences: list[int] = []
    depths: list[int] = []
    end = 0
    for index, (sequence, span) in enumerate(zip(batch.sequences, spans, strict=True)):
        end += span.length
        k = sequence.num_draft_tokens
        rows += range(end - k, end)
        sequences += [index] * k
        depths += range(k)
    return rows, sequences, depths


def real_rows(network: EagleNetwork, batch: DraftBatch) -> tuple[Tensor, Tensor]:
    """Embeddings and features [M, H] of the rows whose tokens and taps are known."""
    tokens = torch.cat([s.token_ids for s in batch.sequences])
    taps = torch.cat([s.taps for s in batch.sequences if s.taps is not None])
    return network.embed(tokens), network.features(taps)


def target_ids(network: EagleNetwork) -> Tensor | None:
    return network.target_ids if network.config.reduced_vocabulary else None


def cache_layout(network: EagleNetwork) -> CacheLayout:
    config = network.config
    return CacheLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)


def split(items: list[int], counts: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for count in counts:
        parts.append(items[start : start + count])
        start += count
    return parts

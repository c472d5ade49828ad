"""EAGLE-3: draft tokens one after the other, each pass fed with the drafter's own last state."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.models.drafter import CacheLayout, Choice, Draft, DraftBatch, SequenceDraft, Span
from peagle.models.eagle import EagleNetwork
from peagle.models.p_eagle import cache_layout, real_rows, target_ids


class Eagle3Drafter:
    """Draft 1 comes from the last real row; draft i + 1 from one row that pairs draft i's
    embedding with the hidden state that produced it. K drafts take K passes."""

    method = "eagle3"
    max_speculative_tokens = MAX_SPECULATIVE_TOKENS

    def __init__(self, network: EagleNetwork) -> None:
        self.network = network
        self.tap_layers = network.config.aux_hidden_state_layer_ids
        self.cache_layout: CacheLayout | None = cache_layout(network)
        self.max_positions: int | None = network.config.max_position_embeddings

    def propose(self, batch: DraftBatch) -> Draft:
        hidden, drafting = self._real_pass(batch)
        choices: list[list[Choice]] = [[] for _ in batch.sequences]
        depth = 0
        while drafting:
            choice = self._choose(batch, hidden, drafting, depth)
            for row, index in enumerate(drafting):
                choices[index].append(_row(choice, row))
            depth += 1
            going_on = [
                row for row, i in enumerate(drafting) if batch.sequences[i].num_draft_tokens > depth
            ]
            drafting = [drafting[row] for row in going_on]
            if drafting:
                tokens = choice.token_ids[going_on]
                hidden = self._draft_pass(batch, tokens, hidden[going_on], drafting, depth)
        return [_join(c) for c in choices]

    def _real_pass(self, batch: DraftBatch) -> tuple[Tensor, list[int]]:
        """Runs the new real rows; -> the last row's state of each sequence that drafts."""
        lengths = [s.token_ids.shape[0] for s in batch.sequences]
        spans = [
            Span(i, s.start, n)
            for i, (s, n) in enumerate(zip(batch.sequences, lengths, strict=True))
        ]
        attention, positions = batch.attend(spans)
        hidden = self.network(*real_rows(self.network, batch), positions, attention)
        drafting = [i for i, s in enumerate(batch.sequences) if s.num_draft_tokens > 0]
        last_rows = torch.tensor(lengths).cumsum(0) - 1
        return hidden[last_rows[drafting]], drafting

    def _draft_pass(
        self, batch: DraftBatch, tokens: Tensor, states: Tensor, drafting: list[int], depth: int
    ) -> Tensor:
        """One row per drafting sequence, `depth` positions past its last real row."""
        spans = []
        for index in drafting:
            sequence = batch.sequences[index]
            last = sequence.start + sequence.token_ids.shape[0] - 1
            spans.append(Span(index, last + depth, 1))
        attention, positions = batch.attend(spans)
        features = self.network.norm(states) if self.network.config.norm_output else states
        out: Tensor = self.network(self.network.embed(tokens), features, positions, attention)
        return out

    def _choose(self, batch: DraftBatch, hidden: Tensor, drafting: list[int], depth: int) -> Choice:
        logits = self.network.logits(hidden)
        depths = [depth] * len(drafting)
        return batch.choose(logits, drafting, depths, target_ids(self.network))


def _row(choice: Choice, row: int) -> Choice:
    law = None if choice.probabilities is None else choice.probabilities[row : row + 1]
    return Choice(choice.token_ids[row : row + 1], law)


def _join(choices: list[Choice]) -> SequenceDraft:
    tokens = [int(c.token_ids) for c in choices]
    laws = [c.probabilities for c in choices if c.probabilities is not None]
    return SequenceDraft(tokens, torch.cat(laws) if laws else None)

"""Runs the models over scheduled requests: the drafter's proposal and the target's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.config import Verification
from peagle.engine.blocks import BlockTable
from peagle.engine.chooser import DraftChooser
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.request import Request
from peagle.engine.scheduler import Scheduled
from peagle.models.attention import Attention
from peagle.models.drafter import (
    CacheLayout,
    DraftBatch,
    Drafter,
    DraftSequence,
    SequenceDraft,
    Span,
)
from peagle.models.target import TargetModel

NO_DRAFT = SequenceDraft([])


class TargetRows(NamedTuple):
    """One scheduled request's share of the target's output."""

    logits: Tensor | None  # [1 + k, V] when the step reaches the newest token
    taps: Tensor | None  # [m + k, 3H] when the request is drafted for


class Runner:
    def __init__(self, target: TargetModel, drafter: Drafter | None, num_slots: int) -> None:
        weight = target.embed_tokens.weight
        self.target = target
        self.drafter = drafter
        self.device = weight.device
        self.target_cache = PagedKVCache(
            target_layout(target), num_slots, weight.dtype, weight.device
        )
        self.draft_cache = None
        if drafter is not None and drafter.cache_layout is not None:
            self.draft_cache = PagedKVCache(
                drafter.cache_layout, num_slots, weight.dtype, weight.device
            )

    def propose(
        self, schedule: Sequence[Scheduled], verification: Verification
    ) -> list[SequenceDraft]:
        """Drafts for each scheduled request; those in mid-prefill only feed the drafter's cache."""
        drafts = [NO_DRAFT] * len(schedule)
        if self.drafter is None:
            return drafts
        chosen = [n for n, s in enumerate(schedule) if self._goes_to_drafter(s)]
        if not chosen:
            return drafts
        requests = [schedule[n].request for n in chosen]
        sequences = [self._draft_sequence(schedule[n]) for n in chosen]

        def attend(spans: Sequence[Span]) -> tuple[Attention, Tensor]:
            assert self.draft_cache is not None
            attention = self.draft_cache.attention([_table(r) for r in requests], spans)
            return attention, attention.positions

        choose = DraftChooser(requests, self.target.config.vocab_size, verification)
        proposed = self.drafter.propose(DraftBatch(sequences, attend, choose))
        for n, draft in zip(chosen, proposed, strict=True):
            drafts[n] = draft
        return drafts

    def forward(
        self, schedule: Sequence[Scheduled], drafts: Sequence[SequenceDraft]
    ) -> list[TargetRows]:
        """One pass of the target over all scheduled tokens and their drafts."""
        tokens: list[int] = []
        logit_rows: list[int] = []
        spans = []
        for n, (scheduled, draft) in enumerate(zip(schedule, drafts, strict=True)):
            request, known = scheduled.request, scheduled.num_tokens
            first = request.num_computed
            new = request.token_ids[first : first + known] + draft.token_ids
            spans.append(Span(n, first, len(new)))
            if scheduled.samples:
                logit_rows += range(len(tokens) + known - 1, len(tokens) + len(new))
            tokens += new
        attention = self.target_cache.attention([_table(s.request) for s in schedule], spans)
        hidden, taps = self.target(
            torch.tensor(tokens, device=self.device),
            attention.positions,
            attention,
            self.drafter.tap_layers if self.drafter else (),
        )
        logits = self.target.logits(hidden[logit_rows]) if logit_rows else hidden[:0]
        kept = [self._may_be_drafted_for(s.request) for s in schedule]
        return _split_rows(schedule, drafts, logits, taps, kept)

    def _may_be_drafted_for(self, request: Request) -> bool:
        """False where taps would only pile up: speculation off, or the head's positions end."""
        reach = self.drafter.max_positions if self.drafter else None
        in_reach = reach is None or request.num_tokens <= reach + 1
        return request.num_speculative_tokens > 0 and in_reach

    def _goes_to_drafter(self, scheduled: Scheduled) -> bool:
        request = scheduled.request
        wants_drafts = scheduled.num_draft_tokens > 0
        if self.drafter is None or not self.drafter.tap_layers:
            return wants_drafts
        in_reach = (
            self.drafter.max_positions is None
            or request.draft_start + request.num_pending <= self.drafter.max_positions
        )
        in_prefill = request.num_uncomputed > 1
        return in_reach and request.num_pending > 0 and (wants_drafts or in_prefill)

    def _draft_sequence(self, scheduled: Scheduled) -> DraftSequence:
        request = scheduled.request
        start = request.draft_start
        taps = request.take_taps() if request.pending_taps else None
        known = request.token_ids[start + 1 : request.draft_start + 1]
        return DraftSequence(
            history=request.token_ids,
            start=start,
            token_ids=torch.tensor(known, dtype=torch.long, device=self.device),
            taps=taps,
            num_draft_tokens=scheduled.num_draft_tokens,
        )


def target_layout(target: TargetModel) -> CacheLayout:
    config = target.config
    return CacheLayout(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)


def _table(request: Request) -> BlockTable:
    assert request.table is not None
    return request.table


def _split_rows(
    schedule: Sequence[Scheduled],
    drafts: Sequence[SequenceDraft],
    logits: Tensor,
    taps: Tensor | None,
    keeps_taps: Sequence[bool],
) -> list[TargetRows]:
    out = []
    row = logit_row = 0
    for scheduled, draft, keeps in zip(schedule, drafts, keeps_taps, strict=True):
        num_rows = scheduled.num_tokens + len(draft.token_ids)
        own_logits = own_taps = None
        if scheduled.samples:
            own_logits = logits[logit_row : logit_row + 1 + len(draft.token_ids)]
            logit_row += len(own_logits)
        if taps is not None and keeps:
            own_taps = taps[row : row + num_rows]
        out.append(TargetRows(own_logits, own_taps))
        row += num_rows
    return out

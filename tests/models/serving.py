"""Drives a drafter as the engine does: a real paged cache, batches, partial acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from models import tiny
from peagle.models.attention import Attention
from peagle.models.drafter import Choice, Draft, DraftBatch, Drafter, DraftSequence, Span


class Text(NamedTuple):
    tokens: Tensor  # [n]
    taps: Tensor  # [n, 3H]


class Served(NamedTuple):
    """One proposal for one text: `known` tokens were there, `logits` [k, Vd] came out."""

    text: int
    known: int
    logits: Tensor
    drafted: list[int]


def make_texts(lengths: Sequence[int], tap_size: int) -> list[Text]:
    generator = torch.Generator().manual_seed(7)
    return [
        Text(
            torch.randint(59, (n,), generator=generator),
            torch.randn(n, tap_size, generator=generator, dtype=torch.float64),
        )
        for n in lengths
    ]


class GreedyChooser:
    """Picks the most likely token and keeps the logits it saw, by sequence and depth."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self, logits: Tensor, sequences: Sequence[int], depths: Sequence[int], ids: Tensor | None
    ) -> Choice:
        for row, sequence, depth in zip(logits, sequences, depths, strict=True):
            assert (sequence, depth) not in self.seen
            self.seen[sequence, depth] = row
        best = logits.argmax(-1)
        return Choice(best if ids is None else ids[best], None)


def serve(drafter: Drafter, texts: Sequence[Text], max_k: int, seed: int = 0) -> list[Served]:
    """Reveals the texts step by step as if drafts were partly accepted; -> all proposals.

    Rows reach the drafter in prefill chunks, then 1 to k + 1 at a time. Sequences join late,
    differ in k, and sometimes want no drafts at all.
    """
    chance = random.Random(seed)
    assert drafter.cache_layout is not None
    tables, num_slots = tiny.shuffled_tables([len(t.tokens) + max_k for t in texts], seed=seed)
    cache = tiny.poisoned_cache(drafter.cache_layout, num_slots)
    fed = [0] * len(texts)  # rows that the drafter has seen
    known = [chance.randint(2, len(t.tokens) // 2) for t in texts]
    out: list[Served] = []
    while any(k < len(t.tokens) for k, t in zip(known, texts, strict=True)):
        batch = [
            n for n, t in enumerate(texts) if known[n] < len(t.tokens) and chance.random() < 0.7
        ]
        if not batch:
            continue
        sequences = [
            _next_rows(texts[n], fed[n], known[n], chance.randint(0, max_k), chance) for n in batch
        ]
        chooser = GreedyChooser()

        def attend(spans: Sequence[Span], batch: list[int] = batch) -> tuple[Attention, Tensor]:
            attention = cache.attention([tables[n] for n in batch], spans)
            return attention, attention.positions

        draft = drafter.propose(DraftBatch(sequences, attend, chooser))
        out += _collect(batch, sequences, draft, chooser, known)
        for n, sequence in zip(batch, sequences, strict=True):
            fed[n] += len(sequence.token_ids)
            if fed[n] == known[n] - 1:  # prefill is over: the target has verified the drafts
                accepted = chance.randint(0, sequence.num_draft_tokens)
                known[n] = min(known[n] + accepted + 1, len(texts[n].tokens))
    return out


def _next_rows(text: Text, fed: int, known: int, k: int, chance: random.Random) -> DraftSequence:
    end = known - 1
    if end - fed > 3 and chance.random() < 0.5:  # a chunk of the prefill, which drafts nothing
        end, k = chance.randint(fed + 1, end - 1), 0
    return DraftSequence(
        history=text.tokens[:known].tolist(),
        start=fed,
        token_ids=text.tokens[fed + 1 : end + 1],
        taps=text.taps[fed:end],
        num_draft_tokens=k,
    )


def _collect(
    batch: Sequence[int],
    sequences: Sequence[DraftSequence],
    draft: Draft,
    chooser: GreedyChooser,
    known: Sequence[int],
) -> list[Served]:
    assert len(draft) == len(sequences)
    out = []
    for index, (n, sequence) in enumerate(zip(batch, sequences, strict=True)):
        k = sequence.num_draft_tokens
        assert len(draft[index].token_ids) == k
        if k:
            logits = torch.stack([chooser.seen.pop((index, depth)) for depth in range(k)])
            out.append(Served(n, known[n], logits, draft[index].token_ids))
    assert not chooser.seen
    return out

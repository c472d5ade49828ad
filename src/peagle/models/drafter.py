"""The drafter seam: the engine hands over what is new since the last step and gets draft tokens.

The engine never asks which algorithm it is. A drafter that reads the target's hidden states says
so by `tap_layers`; one that keeps a cache says how many layers of which shape by `cache_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from peagle.models.attention import Attention


class Span(NamedTuple):
    """Consecutive positions start .. start + length - 1 of one sequence of the batch."""

    sequence: int
    start: int
    length: int


class CacheLayout(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int


class Choice(NamedTuple):
    token_ids: Tensor  # [R], the target's ids
    probabilities: Tensor | None  # [R, V], kept when verification is by rejection


class SpanAttention(Protocol):
    """Makes cached attention for rows laid out as the given spans, one after the other."""

    def __call__(self, spans: Sequence[Span]) -> tuple[Attention, Tensor]:
        """-> the attention object and the rows' positions [N]."""
        ...


class Chooser(Protocol):
    """Draws draft tokens as each sequence's request asks: argmax or with its shared noise."""

    def __call__(
        self, logits: Tensor, sequences: Sequence[int], depths: Sequence[int], ids: Tensor | None
    ) -> Choice:
        """logits [R, Vd]; row r is draft `depths[r]` (0-based) of `sequences[r]`.

        `ids` [Vd] gives the target's id of each draft id, None when they are the same.
        """
        ...


@dataclass(frozen=True)
class DraftSequence:
    """One sequence: rows the drafter has not seen, and how many drafts are wanted (may be 0)."""

    history: Sequence[int]  # all tokens so far, prompt included
    start: int  # position of the first new row
    token_ids: Tensor  # [m]: the token at p+1 for each new row p
    taps: Tensor | None  # [m, 3H]
    num_draft_tokens: int


@dataclass(frozen=True)
class DraftBatch:
    sequences: Sequence[DraftSequence]
    attend: SpanAttention
    choose: Chooser


class SequenceDraft(NamedTuple):
    token_ids: list[int]  # at most num_draft_tokens, possibly none
    probabilities: Tensor | None = None  # [len(token_ids), V] when verification is by rejection


Draft = list[SequenceDraft]  # one entry per sequence of the batch


class Drafter(Protocol):
    method: str
    tap_layers: tuple[int, ...]  # () when the target's hidden states are not needed
    cache_layout: CacheLayout | None
    max_speculative_tokens: int
    max_positions: int | None  # drafts at or beyond this position are not asked for

    def propose(self, batch: DraftBatch) -> Draft: ...

"""N-gram drafter: no weights. What followed the same words before may follow them again."""

from __future__ import annotations

from collections.abc import Sequence

from peagle.config import MAX_SPECULATIVE_TOKENS
from peagle.models.drafter import CacheLayout, SequenceDraft


class NgramDrafter:
    """Proposes the tokens that followed the most recent earlier occurrence of the longest
    suffix of the history, of `longest` down to `shortest` tokens."""

    method = "ngram"
    aux_hidden_state_layers: tuple[int, ...] = ()
    cache_layout: CacheLayout | None = None
    max_speculative_tokens = MAX_SPECULATIVE_TOKENS
    max_positions: int | None = None

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest = shortest
        self.longest = longest

    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        asked = zip(histories, counts, strict=True)
        return [SequenceDraft(self._continuation(history, count)) for history, count in asked]

    def _continuation(self, history: Sequence[int], count: int) -> list[int]:
        if count == 0:
            return []
        # Strings of code points: `rfind` searches in C what a loop over ints would do in Python.
        text = "".join(map(chr, history))
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            found = text.rfind(text[-size:], 0, len(text) - 1)
            if found >= 0:
                start = found + size
                period = len(text) - start  # a draft longer than this repeats itself
                return [history[start + i % period] for i in range(count)]
        return []

"""Tokens -> text as they come, and stop strings. The joined pieces equal the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"  # what a decoder shows for an unfinished UTF-8 character


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class StopMatch(NamedTuple):
    stop: str
    end: int  # where the text is cut


class Detokenizer:
    """Incremental decoding of one answer.

    Tokens are decoded in a window that begins at the last clean border, because a token's text
    may depend on the token before it. Text is held back while it ends in an unfinished
    character, and, for readers of `stable_text`, while it could be the start of a stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.include_stop = include_stop
        self.skip_special_tokens = skip_special_tokens
        self.min_tokens = min_tokens
        self.token_ids: list[int] = []
        self.text = ""
        self._window = 0  # first token of the window
        self._read = 0  # first token whose text is not in `text` yet

    def append(self, token_id: int) -> StopMatch | None:
        """Adds one token; -> the stop string that its text completes. The text is then cut."""
        self.token_ids.append(token_id)
        fresh = self._unread()
        if not fresh or fresh.endswith(REPLACEMENT):
            return None
        return self._add(fresh)

    def finish(self) -> StopMatch | None:
        """Adds what was held back for an unfinished character; it may hold a stop string."""
        return self._add(self._unread())

    @property
    def stable_text(self) -> str:
        """Text that can be shown: no later token can make part of it a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        for held in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-held:]
            if any(s.startswith(tail) for s in self.stop):
                return self.text[:-held]
        return self.text

    def _add(self, fresh: str) -> StopMatch | None:
        self._window, self._read = self._read, len(self.token_ids)
        self.text += fresh
        if len(self.token_ids) <= self.min_tokens:
            return None
        match = self._find_stop(len(fresh))
        if match is not None:
            self.text = self.text[: match.end]
        return match

    def _unread(self) -> str:
        """The text of the tokens behind `_read`."""
        before = self._decode(self._window, self._read)
        return self._decode(self._window, len(self.token_ids))[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(
            self.token_ids[start:end], skip_special_tokens=self.skip_special_tokens
        )

    def _find_stop(self, num_fresh: int) -> StopMatch | None:
        """The stop string that begins first among those that end in the fresh text."""
        found = []
        for stop in self.stop:
            at = self.text.find(stop, max(len(self.text) - num_fresh - len(stop) + 1, 0))
            if at >= 0:
                found.append((at, StopMatch(stop, at + len(stop) if self.include_stop else at)))
        return min(found, key=lambda pair: pair[0])[1] if found else None

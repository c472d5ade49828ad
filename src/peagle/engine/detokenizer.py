"""Tokens -> text as they come, and stop strings. The joined pieces equal the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from peagle.checkpoints.rust_tokenizer import RustTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustBackend

MAX_WINDOW = 16  # tokens that are decoded again to know the text of one more
REPLACEMENT = "\ufffd"  # what a decoder shows for an unfinished UTF-8 character


class Tokenizer(Protocol):
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def decoder_of(tokenizer: Any) -> Tokenizer:
    """The Rust tokenizer that transformers decodes with, where it leaves the text as it is.
    transformers checks every token's type first, which takes nearly as long as decoding."""
    if isinstance(tokenizer, RustTokenizer):
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast as Fast

    own = type(tokenizer)
    leaves_text_alone = (
        isinstance(tokenizer, Fast)
        and (own.decode, own._decode) == (Fast.decode, Fast._decode)
        and not tokenizer.clean_up_tokenization_spaces
    )
    decoder: Tokenizer = tokenizer.backend_tokenizer if leaves_text_alone else tokenizer
    return decoder


def rust_tokenizer(tokenizer: Any) -> RustBackend | None:
    """The Rust library's tokenizer behind another; None where there is none."""
    if isinstance(tokenizer, RustTokenizer):
        return tokenizer.backend_tokenizer
    from transformers import PreTrainedTokenizerFast

    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    backend: RustBackend | None = tokenizer.backend_tokenizer if is_fast else None
    return backend


class StopMatch(NamedTuple):
    stop: str
    end: int  # where the text is cut


class Detokenizer:
    """Incremental decoding of one answer.

    Tokens are decoded in a window that begins at a clean border, because a token's text may
    depend on the token before it. It stays there for some tokens: what was decoded of it before
    need not be decoded again to know what is new. Text is held back while it ends in an unfinished
    character, and, for readers of `stable_text`, while it could be the start of a stop string.

    Without stop strings nothing depends on the text, so it is decoded when somebody reads it.
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
        self._first = {s[0] for s in self.stop}  # characters; few places need a longer look
        self._most_held = max(map(len, self.stop), default=1) - 1  # characters
        self.include_stop = include_stop
        self.skip_special_tokens = skip_special_tokens
        self.min_tokens = min_tokens
        self.token_ids: list[int] = []
        self._text = ""
        self._window = 0  # first token of the window
        self._prefix = ""  # the text from there to `_read`
        self._read = 0  # first token whose text is not in `_text` yet
        self._tried = 0  # tokens that were decoded, if only to find an unfinished character
        self._finished = False

    def append(self, token_id: int) -> StopMatch | None:
        """Adds one token; -> the stop string that its text completes. The text is then cut."""
        self.token_ids.append(token_id)
        return self._decode_next() if self.stop else None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens up to the first whose text completes a stop string."""
        if not self.stop:
            self.token_ids += token_ids
            return
        for token_id in token_ids:
            if self.append(token_id) is not None:
                return

    def finish(self) -> StopMatch | None:
        """Adds what was held back for an unfinished character; it may hold a stop string."""
        self._finished = True
        return self._add(self._unread(len(self.token_ids))) if self.stop else None

    @property
    def text(self) -> str:
        if not self._finished and self._tried < len(self.token_ids):
            self._decode_all()
        if self._finished and self._read < len(self.token_ids) and not self.stop:
            self._add(self._unread(len(self.token_ids)))
        return self._text

    @property
    def stable_text(self) -> str:
        """Text that can be shown: no later token can make part of it a stop string."""
        text = self.text
        for at in range(max(len(text) - self._most_held, 0), len(text)):
            if text[at] in self._first and any(s.startswith(text[at:]) for s in self.stop):
                return text[:at]
        return text

    def _decode_all(self) -> None:
        """All tokens that are left at once, or, where they end in an unfinished character, one by
        one: what comes before it is shown."""
        fresh = self._unread(len(self.token_ids))
        if fresh and not fresh.endswith(REPLACEMENT):
            self._tried = len(self.token_ids)
            self._add(fresh)
        while self._tried < len(self.token_ids):
            self._decode_next()

    def _decode_next(self) -> StopMatch | None:
        """Decodes up to the first token that was not yet."""
        self._tried += 1
        fresh = self._unread(self._tried)
        if not fresh or fresh.endswith(REPLACEMENT):
            return None
        return self._add(fresh)

    def _add(self, fresh: str) -> StopMatch | None:
        if self._finished:
            self._tried = len(self.token_ids)
        self._move_window(fresh)
        self._text += fresh
        if self._tried <= self.min_tokens:
            return None
        match = self._find_stop(len(fresh))
        if match is not None:
            self._text = self._text[: match.end]
        return match

    def _move_window(self, fresh: str) -> None:
        """All tokens that were tried are read now."""
        if self._tried - self._window <= MAX_WINDOW:
            self._prefix += fresh
        else:
            self._window = self._read
            self._prefix = self._decode(self._window, self._tried)
        self._read = self._tried

    def _unread(self, end: int) -> str:
        """The text of the tokens from `_read` to `end`."""
        return self._decode(self._window, end)[len(self._prefix) :]

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return self.tokenizer.decode(
            self.token_ids[start:end], skip_special_tokens=self.skip_special_tokens
        )

    def _find_stop(self, num_fresh: int) -> StopMatch | None:
        """The stop string that begins first among those that end in the fresh text."""
        found = []
        for stop in self.stop:
            at = self._text.find(stop, max(len(self._text) - num_fresh - len(stop) + 1, 0))
            if at >= 0:
                found.append((at, StopMatch(stop, at + len(stop) if self.include_stop else at)))
        return min(found, key=lambda pair: pair[0])[1] if found else None

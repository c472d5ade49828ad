"""An answer of a server while its chunks come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peagle.bench.calls import Answer


@dataclass
class GrowingAnswer:
    """An answer while its chunks come. A server without token ids is taken to send one token a
    chunk until its `usage` says how many there were."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    usage: int | None = None

    def take(self, document: dict[str, Any]) -> bool:
        """True if the chunk brought a token."""
        usage = document.get("usage")
        if usage:
            self.usage = int(usage["completion_tokens"])
        if not document.get("choices"):
            return False
        choice = document["choices"][0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids") or []
        self.text.append(text)
        self.token_ids += ids
        self.num_tokens += len(ids) or bool(text)
        return bool(ids or text)

    def answer(self) -> Answer:
        num_tokens = self.num_tokens if self.usage is None else self.usage
        ids = self.token_ids if len(self.token_ids) == num_tokens else None
        error = None if num_tokens else "the answer is empty"
        return Answer("".join(self.text), num_tokens, ids, error=error)

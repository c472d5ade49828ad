"""Which row of an exported embedding table becomes the mask embedding.

vLLM reads the mask embedding from the head's table, which also serves real tokens: a token that
has the mask's row is drafted after as if it were unknown. So the id must be one that text never
has.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from peagle.checkpoints.references import load_tokenizer
from peagle.checkpoints.targets import eos_token_ids
from peagle.errors import HeadError


def choose_mask_token(folder: Path, vocab_size: int, drafted: Collection[int]) -> int:
    """The best id that the tokenizer in `folder` gives to no text. `drafted`: ids seen in training.

    First an id that the tokenizer does not have at all (tables are often padded), else a special
    token without a task: reserved ones by name, then those never seen, then the highest.
    """
    tokenizer: Any = load_tokenizer(folder)
    absent = set(range(vocab_size)) - set(tokenizer.get_vocab().values())
    if absent:
        return max(absent)
    idle = _idle_special_tokens(tokenizer, set(eos_token_ids(folder)))
    if not idle:
        raise HeadError(
            f"the tokenizer in {folder} has no unused id for the mask",
            hint="name one that never occurs in your text: --mask-token-id ID",
        )
    return max(idle, key=lambda i: (_is_reserved(idle[i]), i not in drafted, i))


def _idle_special_tokens(tokenizer: Any, end_ids: set[int]) -> dict[int, str]:
    """Special tokens that neither the tokenizer, the chat template nor the end of text uses."""
    roles = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
    busy = {getattr(tokenizer, role, None) for role in roles} | end_ids
    template = str(tokenizer.chat_template or "")
    return {
        number: token.content
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and number not in busy and token.content not in template
    }


def _is_reserved(content: str) -> bool:
    return any(word in content.lower() for word in ("reserved", "unused", "mask"))

"""Conversations as the target's chat template writes them, and the fingerprints of what did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from peagle.errors import DataError

Message = dict[str, str]


def chat_token_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The prompt of the next answer, token by token what serving would send."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError) as error:
        raise DataError(f"the chat template refuses the messages: {error}") from None
    # The template writes its own special tokens; the tokenizer must not add them again.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def template_fingerprint(tokenizer: Any) -> str | None:
    """None: the model has no chat template."""
    return _digest(tokenizer.chat_template) if tokenizer.chat_template else None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Of its tokens and their ids: files may be written in other ways and mean the same."""
    return _digest(sorted(tokenizer.get_vocab().items()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def template_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens that every templated prompt begins with, and those that it ends with."""
    probes: list[list[Message]] = [
        [{"role": "user", "content": "What is 2 + 2?"}],
        [{"role": "user", "content": "Zähle bis drei"}],
        [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
    ]
    prompts = []
    for probe in probes:
        try:
            prompts.append(chat_token_ids(tokenizer, probe))
        except DataError:  # some templates know no system message
            continue
    backwards = [prompt[::-1] for prompt in prompts]
    return _common_start(prompts), _common_start(backwards)[::-1]


def _common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    common = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return common

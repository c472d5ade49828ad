"""A tiny model with a tokenizer, and heads for it, as folders: what a user refers to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.checkpoints.heads.loading import save_head
from peagle.checkpoints.targets import load_target

from .models import SHALLOW, save_reference

CONTEXT = 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token, so all but ASCII is split; a few longer tokens, some of which hold
    a part of a character; one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space, lead = "Ġ", "â"  # how byte-level tokenizers write the bytes 20 and E2
    merges = [("a", "b"), ("ab", "c"), (space, lead), ("t", "h"), ("th", "e")]
    tokens = ["<|end|>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def write_model(folder: Path, chat_template: str | None = None, **changes: Any) -> Path:
    tokenizer = byte_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": 6,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    save_reference(folder, SHALLOW.llama_config(**sizes | changes))
    return folder


def write_head(folder: Path, model: Path, method: str = "p-eagle", **changes: Any) -> Path:
    target = load_target(model, dtype=torch.float32, device=torch.device("cpu"))
    fields: dict[str, Any] = {
        "target_model": str(model),
        "aux_hidden_state_layer_ids": (2, 3, 3),
        "max_speculative_tokens": 4,
        "num_speculative_tokens": 3,
    }
    save_head(SHALLOW.make_head(target, method, **fields | changes), folder)
    return folder

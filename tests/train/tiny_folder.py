"""The tiny model of the engine's tests as folders on disk: what a command line refers to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine.conftest import byte_tokenizer
from engine.tiny import llama_config, make_head
from transformers import LlamaForCausalLM

from peagle.checkpoints.heads.loading import save_head
from peagle.checkpoints.targets import load_target

CONTEXT = 256


def write_model(folder: Path, chat_template: str | None = None, seed: int = 0) -> Path:
    tokenizer = byte_tokenizer()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        llama_config(
            vocab_size=len(tokenizer),
            num_hidden_layers=6,
            max_position_embeddings=CONTEXT,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def write_head(folder: Path, model: Path, method: str = "p-eagle", **changes: Any) -> Path:
    target = load_target(model, dtype=torch.float32, device=torch.device("cpu"))
    fields: dict[str, Any] = {
        "target_model": str(model),
        "aux_hidden_state_layer_ids": (2, 3, 3),
        "max_speculative_tokens": 4,
        "num_speculative_tokens": 3,
    }
    save_head(make_head(target, method, **fields | changes), folder)
    return folder

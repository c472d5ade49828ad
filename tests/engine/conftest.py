"""A tiny model on disk, with a tokenizer that splits characters, and heads for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from peagle.checkpoints.heads.loading import save_head
from peagle.checkpoints.targets import load_target
from peagle.engine.llm import LLM

from . import tiny

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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        tiny.llama_config(
            vocab_size=len(tokenizer),
            max_position_embeddings=160,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def head_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = load_target(model_folder, dtype=torch.float32, device=torch.device("cpu"))
    folder = tmp_path_factory.mktemp("heads") / "p-eagle"
    save_head(tiny.make_head(target, num_hidden_layers=2, max_speculative_tokens=6), folder)
    return folder


@pytest.fixture(scope="session")
def plain_llm(model_folder: Path) -> LLM:
    return LLM(str(model_folder), device="cpu", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="session")
def spec_llm(model_folder: Path, head_folder: Path) -> LLM:
    return LLM(
        str(model_folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        speculative_config={"model": str(head_folder), "num_speculative_tokens": 5},
    )


@pytest.fixture(scope="session")
def scripted_llm(model_folder: Path) -> LLM:
    """Its drafter is set by `use_drafter`."""
    return LLM(
        str(model_folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 16},
    )

"""Data is templated as serving templates, and fingerprints tell templates apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.data.chat import (
    chat_token_ids,
    template_fingerprint,
    template_frame,
    tokenizer_fingerprint,
)
from peagle.engine.llm import LLM
from peagle.errors import DataError
from tests.tiny.folders import byte_tokenizer, write_model

MESSAGES = [{"role": "user", "content": "Hi there"}]


def test_prompts_are_those_that_the_engine_renders(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), device="cpu", max_num_seqs=1)
    expected = llm.render_chat(MESSAGES)["prompt_token_ids"]
    assert chat_token_ids(llm.get_tokenizer(), MESSAGES) == expected


def test_a_template_that_refuses_is_a_data_error() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(DataError, match="no such role"):
        chat_token_ids(tokenizer, MESSAGES)


def test_the_frame_is_what_all_templated_prompts_share() -> None:
    tokenizer = byte_tokenizer()
    start, end = template_frame(tokenizer)
    assert tokenizer.decode(start) == "<|"
    assert tokenizer.decode(end) == "\n<|assistant|>"


def test_fingerprints_follow_the_content() -> None:
    one, other = byte_tokenizer(), byte_tokenizer()
    assert template_fingerprint(one) == template_fingerprint(other)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.chat_template = "{{ messages }}"
    other.add_tokens(["<|new|>"])
    assert template_fingerprint(one) != template_fingerprint(other)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)

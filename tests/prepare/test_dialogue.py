"""Data is templated as serving templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.engine.llm import LLM
from peagle.errors import RequestError
from peagle.prepare.dialogue import chat_renderer
from tests.tiny.folders import byte_tokenizer, write_model

MESSAGES = [{"role": "user", "content": "Hi there"}]
SYSTEM = {"role": "system", "content": "Be brief"}


def test_prompts_are_those_that_the_engine_renders(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), device="cpu", max_num_seqs=1)
    tokenizer = llm.get_tokenizer()
    plain = llm.render_chat(MESSAGES)["prompt_token_ids"]
    assert chat_renderer(tokenizer)(MESSAGES) == plain
    briefly = llm.render_chat([SYSTEM, *MESSAGES])["prompt_token_ids"]
    assert briefly != plain
    assert chat_renderer(tokenizer, "Be brief")(MESSAGES) == briefly
    assert chat_renderer(tokenizer, "Be long")([SYSTEM, *MESSAGES]) == briefly


def test_a_template_that_refuses_is_the_users_error() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(RequestError, match="no such role"):
        chat_renderer(tokenizer)(MESSAGES)

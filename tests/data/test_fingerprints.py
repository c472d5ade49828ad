"""Fingerprints tell templates and tokenizers apart."""

from __future__ import annotations

from peagle.data.fingerprints import template_fingerprint, tokenizer_fingerprint
from tests.tiny.folders import byte_tokenizer


def test_fingerprints_follow_the_content() -> None:
    one, other = byte_tokenizer(), byte_tokenizer()
    assert template_fingerprint(one) == template_fingerprint(other)
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(other)
    other.chat_template = "{{ messages }}"
    other.add_tokens(["<|new|>"])
    assert template_fingerprint(one) != template_fingerprint(other)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)

"""Claim 9, token by token: joined pieces equal the whole text, and no stop string leaks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from peagle.engine.detokenizer import Detokenizer, decoder_of
from tests.tiny.folders import byte_tokenizer

SPECIAL = 1000  # an id that decodes to "<end>" or to nothing


class ByteTokenizer:
    """Ids below 256 are bytes, so that most characters are split over tokens; others are
    given strings of bytes, such as a space with the first byte of a character."""

    def __init__(self, pieces: Sequence[bytes] = ()) -> None:
        self.pieces = {256 + n: piece for n, piece in enumerate(pieces)}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        data = b""
        for token in token_ids:
            if token == SPECIAL:
                data += b"" if skip_special_tokens else b"<end>"
            else:
                data += self.pieces.get(token) or bytes([token])
        return data.decode("utf-8", errors="replace")


def shown(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[list[str], str | None]:
    """What a reader of the stream has seen after each token, then the whole; and the stop."""
    seen = []
    for token in token_ids:
        match = detokenizer.append(token)
        if match is not None:
            return [*seen, detokenizer.text], match.stop
        seen.append(detokenizer.stable_text)
    match = detokenizer.finish()
    return [*seen, detokenizer.text], match.stop if match else None


texts = st.text(alphabet="ab€é😀\n \u0301\ufffd", max_size=20)
tokens = st.one_of(
    texts.map(lambda t: list(t.encode())),
    st.lists(st.one_of(st.integers(0, 255), st.just(SPECIAL)), max_size=12),  # broken UTF-8, too
    st.lists(st.sampled_from([97, 98, 0xE2, 0x82, 0xAC, SPECIAL, 256, 257]), max_size=16),
)
PIECES = (b"b \xe2", b"\x82\xacab")


@given(tokens, st.booleans())
def test_pieces_only_grow_and_joined_equal_the_whole_text(token_ids: list[int], skip: bool) -> None:
    tokenizer = ByteTokenizer(PIECES)
    seen, _ = shown(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids)
    joined = ""
    for text in seen:
        assert text.startswith(joined)
        joined = text
    assert joined == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(
    tokens,
    st.lists(st.text(alphabet="ab€\n ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_stop_string_never_leaks_wherever_tokens_split_it(
    token_ids: list[int], stops: list[str], include: bool
) -> None:
    tokenizer = ByteTokenizer(PIECES)
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    seen, stopped = shown(Detokenizer(tokenizer, stops, include_stop=include), token_ids)
    assert (stopped is not None) == any(s in whole for s in stops)
    for earlier, later in pairwise(seen):
        assert later.startswith(earlier)
    text = seen[-1]
    assert whole.startswith(text)
    if stopped is None:
        assert text == whole
    elif include:
        assert text.endswith(stopped)
        assert not any(s in before for s in stops for before in seen[:-1])
    else:
        assert not any(s in before for s in stops for before in seen)
        assert whole.startswith(text + stopped)


def test_a_stop_string_ends_at_the_token_that_completes_it() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["<|"])
    assert detokenizer.append(ord("a")) is None
    assert detokenizer.append(ord("<")) is None
    assert (detokenizer.text, detokenizer.stable_text) == ("a<", "a")
    match = detokenizer.append(ord("|"))
    assert match is not None
    assert (match.stop, match.end, detokenizer.text) == ("<|", 1, "a")


def test_the_stop_string_that_begins_first_wins() -> None:
    tokenizer = ByteTokenizer([b"xabcy"])
    for stops in (["bc", "ab"], ["ab", "bc"]):
        detokenizer = Detokenizer(tokenizer, stops)
        match = detokenizer.append(256)
        assert match is not None
        assert match.stop == "ab"
        assert detokenizer.text == "x"


def test_a_false_start_of_a_stop_string_is_shown_once_it_is_known_to_be_one() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["aab"])
    seen, stopped = shown(detokenizer, b"aaac")
    assert stopped is None
    assert seen == ["", "", "a", "aaac", "aaac"]


def test_a_stop_string_held_back_with_an_unfinished_character_is_found_at_the_end() -> None:
    """One token holds the stop string and the first byte of a character that never comes."""
    detokenizer = Detokenizer(ByteTokenizer([b"STOP\xe2"]), ["STOP"])
    seen, stopped = shown(detokenizer, [ord("x"), 256])
    assert stopped == "STOP"
    assert seen == ["x", "x", "x"]


@pytest.mark.parametrize(("minimum", "expected"), [(0, "x"), (2, "x"), (3, "xABy"), (4, "xAByABz")])
def test_stop_strings_count_only_beyond_min_tokens(minimum: int, expected: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["AB"], min_tokens=minimum)
    seen, _ = shown(detokenizer, b"xAByAB")
    if minimum == 4:
        assert seen[-1] == "xABy"
    else:
        assert seen[-1] == expected


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        seen, _ = shown(Detokenizer(ByteTokenizer(), skip_special_tokens=skip), [97, SPECIAL, 98])
        assert seen[-1] == text


def test_a_tokenizer_that_drops_the_first_space_keeps_the_others() -> None:
    """As SentencePiece decoders do: what a token gives depends on the token before it."""

    class Words:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return "".join(f" w{t}" for t in token_ids).removeprefix(" ")

    seen, _ = shown(Detokenizer(Words()), [1, 2, 3])
    assert seen == ["w1", "w1 w2", "w1 w2 w3", "w1 w2 w3"]


@given(st.lists(st.integers(0, 261), max_size=12), st.booleans())
def test_decoder_of_a_tokenizer_gives_its_text(token_ids: list[int], skip: bool) -> None:
    tokenizer = byte_tokenizer()
    decoder = decoder_of(tokenizer)
    assert decoder is tokenizer.backend_tokenizer
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert decoder.decode(token_ids, skip_special_tokens=skip) == expected


def test_a_tokenizer_that_changes_decoded_text_decodes_itself() -> None:
    class Shouts(PreTrainedTokenizerFast):
        def decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super().decode(*args, **kwargs)).upper()

    cleans = byte_tokenizer()
    cleans.clean_up_tokenization_spaces = True
    shouts = Shouts(tokenizer_object=byte_tokenizer().backend_tokenizer)
    for tokenizer in (cleans, shouts, ByteTokenizer()):
        assert decoder_of(tokenizer) is tokenizer


class Words:
    """A token's text depends on whether one stands before it, as with SentencePiece."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(f"w{token}" for token in token_ids)


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_long_texts_keep_what_stands_between_tokens(stop: tuple[str, ...], size: int) -> None:
    """Longer than the window, however many tokens come at once."""
    token_ids, tokenizer = list(range(100)), Words()
    detokenizer = Detokenizer(tokenizer, stop)
    for first in range(0, len(token_ids), size):
        detokenizer.extend(token_ids[first : first + size])
        shown = tokenizer.decode(token_ids[: first + size], skip_special_tokens=True)
        assert detokenizer.text == shown

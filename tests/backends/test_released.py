"""The table of released heads is complete, consistent, and says what it does not know."""

from __future__ import annotations

import pytest

from peagle.backends.vllm.released import (
    find_released,
    nearest_name,
    released_models,
    released_with_head,
)

# From the heads' cards: target, head, K, depth.
CARDS = {
    "gpt-oss-20b": ("openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle", 7, 10),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "amazon/gpt-oss-120b-p-eagle", 5, 8),
    "qwen3-coder-30b-a3b-instruct": (
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE",
        10,
        18,
    ),
}


def test_the_four_models_of_the_posts_are_there() -> None:
    assert set(released_models()) == {*CARDS, "gemma-4-31b-it"}


@pytest.mark.parametrize("name", CARDS)
def test_target_head_and_k_are_those_of_the_card(name: str) -> None:
    model = released_models()[name]
    found = (model.target, model.head, model.num_speculative_tokens, model.max_speculative_tokens)
    assert found == CARDS[name]
    assert model.confirmed


def test_what_no_card_confirms_is_marked() -> None:
    unconfirmed = [model.name for model in released_models().values() if not model.confirmed]
    assert unconfirmed == ["gemma-4-31b-it"]


def test_no_k_is_deeper_than_its_head() -> None:
    for model in released_models().values():
        assert model.num_speculative_tokens <= (model.max_speculative_tokens or 64)


def test_names_and_head_ids_are_found_in_any_case() -> None:
    assert find_released("GPT-OSS-20B") is released_models()["gpt-oss-20b"]
    model = released_with_head("amazon/GPT-OSS-20B-P-EAGLE")
    assert model is released_models()["gpt-oss-20b"]
    assert released_with_head("amazon/gpt-oss-20b-p-eagle-long-context") is model
    assert find_released("gpt-oss") is None
    assert released_with_head("") is None


def test_the_table_cannot_be_changed_by_its_readers() -> None:
    with pytest.raises(TypeError):
        released_models()["x"] = released_models()["gpt-oss-20b"]  # type: ignore[index]


def test_the_nearest_name_is_suggested() -> None:
    assert nearest_name("gpt-os-20b", released_models()) == "gpt-oss-20b"
    assert nearest_name("zzz", released_models()) is None

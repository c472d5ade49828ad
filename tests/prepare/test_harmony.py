"""GPT-OSS's channels: all that was generated is supervised, the final channel alone goes back."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from peagle.data.prompts import Conversation
from peagle.prepare.answers import TargetAnswer
from peagle.prepare.dataset_spec import DatasetSpec
from peagle.prepare.dialogue import Dialogue
from peagle.prepare.harmony import final_text
from peagle.sampling_params import SamplingParams
from tests.tiny.folders import byte_tokenizer

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<|constrain|>")
# As gpt-oss's own template: earlier answers are their final text, the reasoning is dropped.
TEMPLATE = (
    "Reasoning: {{ reasoning_effort or 'medium' }}\n"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}<|end|>"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>yes<|return|>"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(token, special=True) for token in SPECIAL]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rows_of(tokenizer: object, *answers: str, **options: object) -> list[tuple[str, str]]:
    """Text of each row, and of what is supervised in it."""
    spec = DatasetSpec(target="tiny", params=SamplingParams(), **options)  # type: ignore[arg-type]
    dialogue = Dialogue(
        Conversation("c", ("one", "two", "three")), spec.dialogue_options(tokenizer)
    )
    for answer in answers:
        question = dialogue.next_question()
        assert question is not None
        ids = tokenizer.encode(answer)  # type: ignore[attr-defined]
        dialogue.take(question, TargetAnswer(ids))
    decode = tokenizer.decode  # type: ignore[attr-defined]
    found = []
    for row in dialogue.finish():
        pairs = zip(row.token_ids, row.loss_mask, strict=True)
        found.append((decode(row.token_ids), decode([token for token, mask in pairs if mask])))
    return found


def test_each_turn_is_a_row_that_supervises_all_channels(tokenizer: object) -> None:
    first, second = rows_of(tokenizer, ANSWER, ANSWER)
    begin = "Reasoning: medium\n<|start|>user<|message|>one<|end|><|start|>assistant"
    assert first == (begin + ANSWER, ANSWER)
    said = "<|channel|>final<|message|>yes<|end|>"
    follow_up = "<|start|>user<|message|>two<|end|><|start|>assistant"
    assert second == (begin + said + follow_up + ANSWER, ANSWER)


@pytest.mark.parametrize("answer", [CALL, THOUGHT, "<|channel|>analysis<|message|>and so"])
def test_a_conversation_ends_with_a_tool_call_or_without_an_answer(
    tokenizer: object, answer: str
) -> None:
    options = DatasetSpec(target="tiny", params=SamplingParams()).dialogue_options(tokenizer)
    dialogue = Dialogue(Conversation("c", ("one", "two")), options)
    question = dialogue.next_question()
    assert question is not None
    dialogue.take(question, TargetAnswer(tokenizer.encode(answer)))  # type: ignore[attr-defined]
    assert dialogue.next_question() is None
    assert len(dialogue.finish()) == 1


def test_the_reasoning_mode_is_the_one_that_is_asked_for(tokenizer: object) -> None:
    ((text, _),) = rows_of(tokenizer, ANSWER, chat_template_kwargs={"reasoning_effort": "high"})
    assert text.startswith("Reasoning: high\n")


def test_the_last_final_channel_counts() -> None:
    twice = f"{ANSWER[: -len('<|return|>')]}<|end|><|start|>assistant<|channel|>final<|message|>no"
    assert final_text(twice) == "no"
    assert final_text("no channels at all") is None

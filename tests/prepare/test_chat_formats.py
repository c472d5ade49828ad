"""All that was generated is supervised, in the reasoning mode that is served; of it, the content
alone goes back. Templates as the families' own, without what these conversations do not reach."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from peagle.data.prompts import Conversation
from peagle.doctor import check_template_kwargs
from peagle.prepare.answers import TargetAnswer
from peagle.prepare.dataset_spec import DatasetSpec
from peagle.prepare.dialogue import Dialogue
from peagle.sampling_params import SamplingParams
from tests.tiny.folders import byte_tokenizer

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>", "<|constrain|>")
SPECIAL += ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<|turn>")
SPECIAL += ("<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool_call>", "<tool_call|>")
# GPT-OSS: earlier answers are their final text, the reasoning is dropped.
HARMONY = (
    "Reasoning: {{ reasoning_effort or 'medium' }}\n"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}<|end|>"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\nCall as <tool_call><function=name><parameter=key>value"
    "</parameter></function></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A system message stands at the head of the first turn, and texts are trimmed.
GEMMA_3 = (
    "<bos>{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Without reasoning an answer begins after an empty thought, of which a history has no trace.
GEMMA_4 = (
    "<bos>{% if enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}{% for call in m.tool_calls or [] %}<|tool_call>call:"
    "{{ call.function.name }}{}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n"
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>yes<|return|>"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{}}<|call|>"


def speaking(chat_template: str) -> Any:
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(token, special=True) for token in SPECIAL]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return speaking(HARMONY)


def talk(tokenizer: Any, *answers: str, system: str | None = None, **options: Any) -> Dialogue:
    """Until it ends, or there are no more answers."""
    spec = DatasetSpec(target="tiny", params=SamplingParams(), **options)
    turns = Conversation("c", ("one", "two", "three"), system=system)
    dialogue = Dialogue(turns, spec.dialogue_options(tokenizer))
    for answer in answers:
        question = dialogue.next_question()
        assert question is not None
        dialogue.take(question, TargetAnswer(tokenizer.encode(answer)))
    return dialogue


def rows_of(tokenizer: Any, *answers: str, **options: Any) -> list[tuple[str, str]]:
    """Text of each row, and of what is supervised in it."""
    dialogue, decode, found = talk(tokenizer, *answers, **options), tokenizer.decode, []
    for row in dialogue.finish():
        pairs = zip(row.token_ids, row.loss_mask, strict=True)
        found.append((decode(row.token_ids), decode([token for token, mask in pairs if mask])))
    return found


def test_each_turn_is_a_row_that_supervises_all_channels(tokenizer: Any) -> None:
    first, second = rows_of(tokenizer, ANSWER, ANSWER)
    begin = "Reasoning: medium\n<|start|>user<|message|>one<|end|><|start|>assistant"
    assert first == (begin + ANSWER, ANSWER)
    said = "<|channel|>final<|message|>yes<|end|>"
    follow_up = "<|start|>user<|message|>two<|end|><|start|>assistant"
    assert second == (begin + said + follow_up + ANSWER, ANSWER)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (HARMONY, CALL),
        (HARMONY, THOUGHT),
        (HARMONY, "<|channel|>analysis<|message|>and so"),
        (QWEN3_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>"),
        (GEMMA_4, "<|tool_call>call:f{}<tool_call|>"),
        (GEMMA_4, "<|channel>thought\nand so"),
    ],
)
def test_a_conversation_ends_with_a_tool_call_or_without_an_answer(
    template: str, answer: str
) -> None:
    dialogue = talk(speaking(template), answer)
    assert dialogue.next_question() is None
    assert len(dialogue.finish()) == 1


def test_the_reasoning_mode_is_the_one_that_is_asked_for(tokenizer: Any) -> None:
    ((text, _),) = rows_of(tokenizer, ANSWER, chat_template_kwargs={"reasoning_effort": "high"})
    assert text.startswith("Reasoning: high\n")


def test_all_turns_of_qwen3_coder_are_one_row() -> None:
    ((text, supervised),) = rows_of(speaking(QWEN3_CODER), "yes<|im_end|>", "no<|im_end|>")
    assert supervised == "yes<|im_end|>no<|im_end|>"
    assert text == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nno<|im_end|>"
    )


def test_turns_of_gemma_3_are_one_row_until_the_template_trims_an_answer() -> None:
    end = "<end_of_turn>"
    answers = (f"yes{end}", f"no {end}", f"maybe{end}")
    first, second = rows_of(speaking(GEMMA_3), *answers, system="Be brief")
    begin = f"<bos><start_of_turn>user\nBe brief\n\none{end}\n<start_of_turn>model\n"
    go_on = f"yes{end}\n<start_of_turn>user\ntwo{end}\n<start_of_turn>model\n"
    assert first == (f"{begin}{go_on}no {end}", f"yes{end}no {end}")
    last = f"no{end}\n<start_of_turn>user\nthree{end}\n<start_of_turn>model\n"
    assert second == (f"{begin}{go_on}{last}maybe{end}", f"maybe{end}")


@pytest.mark.parametrize("thinks", [False, True])
def test_each_turn_of_gemma_4_is_a_row_in_the_mode_that_is_served(thinks: bool) -> None:
    thought = "<|channel>thought\nhm<channel|>" if thinks else ""
    kwargs = {"enable_thinking": True} if thinks else {}
    answers = (f"{thought}yes<turn|>", f"{thought}no<turn|>")
    first, second = rows_of(speaking(GEMMA_4), *answers, chat_template_kwargs=kwargs)
    system = "<|turn>system\n<|think|><turn|>\n" if thinks else ""
    begin = f"<bos>{system}<|turn>user\none<turn|>\n<|turn>model\n"
    closed = "" if thinks else "<|channel>thought\n<channel|>"
    assert first == (f"{begin}{closed}{answers[0]}", answers[0])
    follow_up = "<|turn>user\ntwo<turn|>\n<|turn>model\n"
    assert second == (f"{begin}yes<turn|>\n{follow_up}{closed}{answers[1]}", answers[1])


@pytest.mark.parametrize(
    ("prepared", "served", "level"),
    [
        ({}, {"enable_thinking": True}, "warning"),
        ({"enable_thinking": True}, {}, "warning"),
        ({"enable_thinking": False}, {}, "ok"),
        ({"enable_thinking": True}, {"enable_thinking": True}, "ok"),
        ({"ignored": 1}, {}, "ok"),
    ],
)
def test_doctor_warns_where_data_and_serving_have_other_prompts(
    prepared: dict[str, Any], served: dict[str, Any], level: str
) -> None:
    made_by = {"chat_template_kwargs": prepared}
    assert check_template_kwargs(made_by, served, speaking(GEMMA_4)).level == level

"""What grows with an answer, and what is read of it only when somebody asks."""

from __future__ import annotations

import dataclasses

import pytest

from peagle.engine.answers import PromptAnswers
from peagle.engine.llm import LLM
from peagle.engine.prompts import TokenizedPrompt
from peagle.outputs import CompletionOutput, RequestOutput
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters

NEVER_SAID = "\x00never\x00"
SAMPLED = SamplingParams(seed=5, max_tokens=24, ignore_eos=True)


def opened(llm: LLM, params: SamplingParams) -> PromptAnswers:
    return llm.add_request(TokenizedPrompt(None, llm.get_tokenizer().encode("abc the €é")), params)


def snapshots(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    """After each step that brought something."""
    answers, seen = opened(llm, params), []
    while not answers.finished:
        if answers in llm.step():
            seen.append(answers.output())
            assert answers.num_output_tokens == sum(len(o.token_ids) for o in seen[-1].outputs)
            assert answers.finished == all(o.finished() for o in seen[-1].outputs)
    return seen


def shown(seen: list[RequestOutput]) -> list[list[CompletionOutput]]:
    return [output.outputs for output in seen]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include", [False, True])
def test_text_read_late_equals_text_read_with_each_token(
    spec_llm: LLM, n: int, include: bool
) -> None:
    """Stop strings make the engine's reader follow each token; without any it comes later."""
    eos = spec_llm.get_tokenizer().eos_token_id
    late = dataclasses.replace(
        SAMPLED,
        n=n,
        stop_token_ids=[eos],
        logit_bias={eos: 4.0},
        include_stop_str_in_output=include,
        skip_special_tokens=False,
    )
    early = dataclasses.replace(late, stop=NEVER_SAID)
    seen = snapshots(spec_llm, late)
    assert shown(seen) == shown(snapshots(spec_llm, early))
    ended = [o for o in seen[-1].outputs if o.finish_reason == "stop"]
    assert ended
    assert all(o.text.endswith("<|end|>") == include for o in ended)


def test_counts_are_cut_with_the_tokens_behind_a_stop_string(scripted_llm: LLM) -> None:
    (whole,) = snapshots(scripted_llm, SAMPLED)[-1:]
    known = whole.prompt_token_ids + whole.outputs[0].token_ids
    scripted_llm.engine.runner.drafter = drafters.oracle([known])  # a step brings many tokens
    stop = next(c for c in whole.outputs[0].text[6:] if c.isascii() and c.isprintable())
    for n in (1, 3):
        seen = snapshots(scripted_llm, dataclasses.replace(SAMPLED, n=n, stop=stop))
        assert seen[-1].outputs[0].stop_reason == stop
        assert len(seen[-1].outputs[0].token_ids) < len(whole.outputs[0].token_ids)


def test_time_of_the_first_token_stays_and_the_last_answers_end_is_the_end(spec_llm: LLM) -> None:
    answers = opened(spec_llm, dataclasses.replace(SAMPLED, n=2))
    firsts = set()
    while not answers.finished:
        assert answers.metrics.finished_time is None
        spec_llm.step()
        firsts.add(answers.metrics.first_token_time)
    (first,) = firsts - {None}
    assert answers.metrics.finished_time is not None
    assert answers.metrics.arrival_time <= first < answers.metrics.finished_time


def test_an_aborted_prompt_is_finished_and_keeps_what_it_has(spec_llm: LLM) -> None:
    answers = opened(spec_llm, SAMPLED)
    while not answers.num_output_tokens:
        spec_llm.step()
    before = answers.output()
    spec_llm.abort_request(answers)
    after = answers.output()
    assert after.finished
    assert after.outputs[0].finish_reason == "abort"
    assert after.outputs[0].text == before.outputs[0].text
    assert after.metrics.finished_time is None

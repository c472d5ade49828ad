"""Answers against the plain target's, and which tokens were drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from peagle.bench.results.document import AnswerDifference
from peagle.bench.run.lossless import (
    GapQuery,
    KnownGaps,
    answers_of,
    compare_answers,
    first_difference,
    logprob_gaps,
)
from peagle.bench.run.null_backend import NullTokenizer
from peagle.bench.run.run_files import drafted_flags, samples, token_texts
from peagle.bench.workloads.workload import Task
from peagle.engine.llm import LLM
from peagle.engine.prompts import TokenizedPrompt
from peagle.sampling_params import SamplingParams
from tests.tolerance import rounding

from .fakes import record

ABOUT = AnswerDifference("p-eagle", 3, "w", "1", 0, "", 0, 0, None, None)


def answer(task: str, token_ids: list[int], turn: int = 0) -> Any:
    return record(
        [1.0],
        [len(token_ids)],
        token_ids=token_ids,
        task=Task(task, ("x", "y")),
        turn=turn,
        prompt=TokenizedPrompt(None, [90, 91]),
    )


@pytest.mark.parametrize(
    ("expected", "got", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 5], 1),
        ([], [], None),
    ],
)
def test_first_difference_is_found(expected: list[int], got: list[int], at: int | None) -> None:
    assert first_difference(expected, got) == at


def test_answer_that_failed_is_no_reference() -> None:
    failed = answer("a", [1, 2])
    failed.answer = replace(failed.answer, error="out of memory")
    assert answers_of([failed, answer("b", [3])]) == {("b", 0): [3]}


def test_differences_are_counted_with_their_place_and_gap() -> None:
    reference = answers_of([answer("a", [1, 2, 3]), answer("b", [4, 5])])
    asked: list[GapQuery] = []

    def gaps_of(queries: Any) -> list[float | None]:
        asked.extend(queries)
        return [0.25] * len(queries)

    records = [answer("a", [1, 7, 3]), answer("b", [4, 5])]
    found = compare_answers(records, reference, ABOUT, gaps_of=gaps_of, tokenizer=NullTokenizer())
    assert (found.compared, found.different, found.not_comparable) == (2, 1, 0)
    (difference,) = found.differences
    assert (difference.prompt, difference.position) == ("a", 1)
    assert (difference.expected, difference.got, difference.gap) == (2, 7, 0.25)
    assert difference.got_text == chr(7)
    assert asked == [((90, 91, 1), 2, 7)]  # prompt, then the common part of the answer


def test_turns_behind_a_difference_are_not_compared() -> None:
    reference = answers_of([answer("a", [1]), answer("a", [2], turn=1)])
    found = compare_answers([answer("a", [9]), answer("a", [8], turn=1)], reference, ABOUT)
    assert (found.compared, found.different, found.not_comparable) == (1, 1, 1)


def test_prompt_asked_again_is_compared_with_the_first() -> None:
    reference = answers_of([answer("a", [1]), answer("a~2", [1])])
    assert list(reference) == [("a", 0)]
    found = compare_answers([answer("a~2", [1]), answer("a~3", [2])], reference, ABOUT)
    assert (found.compared, found.different) == (2, 1)


def test_gap_is_the_plain_targets_even_on_an_engine_that_drafts(model: str, head: str) -> None:
    options: Any = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4}
    drafter = {"model": head, "num_speculative_tokens": 3}
    plain, drafting = LLM(model, **options), LLM(model, speculative_config=drafter, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    row = plain.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].logprobs
    assert row is not None
    best, second = (next(t for t, e in row[0].items() if e.rank == r) for r in (1, 2))
    expected = row[0][best].logprob - row[0][second].logprob
    size = len(plain.get_tokenizer())
    assert expected > 0
    near, full = GapQuery((5, 6, 7), best, second), GapQuery((5,) * 400, best, second)
    gaps = logprob_gaps(drafting, [near, full], size)
    close = pytest.approx(expected, abs=rounding(terms=64, depth=7))
    assert gaps == [close, None]  # the context is full
    unlikely = next(t for t in range(size) if t not in _best(plain, 16))
    (gap,) = logprob_gaps(drafting, [GapQuery((5, 6, 7), best, unlikely)], size)
    assert gap is not None
    assert gap > expected


def _best(llm: LLM, count: int) -> set[int]:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count)
    row = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].logprobs
    assert row is not None
    return set(row[0])


def test_a_gap_is_asked_for_once(model: str) -> None:
    backend = LLM(model, device="cpu", dtype="float32", max_num_seqs=4)
    known, asked = KnownGaps(len(backend.get_tokenizer())), list[int]()
    own = backend.generate
    backend.generate = lambda prompts, params: (  # type: ignore[method-assign]
        asked.append(len(prompts)) or own(prompts, params)  # type: ignore[func-returns-value]
    )
    query = GapQuery((5, 6, 7), 3, 4)
    assert len(known.of(backend, [query, query])) == 2
    seen = sum(asked)
    assert known.of(backend, [query]) == known.of(backend, [query])
    assert sum(asked) == seen > 0


def test_all_but_a_steps_last_token_were_drafts() -> None:
    one = record([1, 2, 3], [1, 4, 6], accepted=[(0, 0), (3, 2), (3, 1)])
    assert drafted_flags(one) == [False, True, True, False, True, False]


def test_answer_cut_at_an_accepted_draft_ends_in_a_draft() -> None:
    one = record([1, 2], [1, 3], accepted=[(0, 0), (3, 2)])  # both tokens of step 2 were drafts
    assert drafted_flags(one) == [False, True, True]


def test_without_a_drafter_nothing_was_drafted_though_two_steps_were_read_at_once() -> None:
    one = record([1, 2], [2, 3], accepted=[(0, 0), (0, 0), (0, 0)])
    assert drafted_flags(one) == [False, False, False]


def test_samples_hold_the_text_of_each_token() -> None:
    one = record([1, 2], [1, 3], token_ids=[72, 105, 33], accepted=[(0, 0), (2, 1)])
    found = samples([one], NullTokenizer(), workload="w", method="m", num_speculative_tokens=2)
    assert [(t.text, t.drafted) for t in found[0].tokens] == [
        ("H", False),
        ("i", True),
        ("!", False),
    ]


def test_samples_keep_the_question_only_where_it_is_ours() -> None:
    one = record([1.0], [2], token_ids=[72, 105], accepted=[(0, 0)])
    options: Any = {"method": "m", "num_speculative_tokens": 2}
    for workload, question in (("offline", "hello"), ("mt-bench", "")):
        (found,) = samples([one], NullTokenizer(), workload=workload, **options)
        assert found.question == question


def test_character_split_over_tokens_comes_whole(model: str) -> None:
    from peagle.checkpoints.references import load_tokenizer

    tokenizer = load_tokenizer(model)  # type: ignore[arg-type]
    ids = tokenizer.encode("aé!", add_special_tokens=False)
    assert len(ids) == 4
    assert token_texts(tokenizer, ids) == ["a", "", "é", "!"]

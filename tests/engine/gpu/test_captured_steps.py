"""Claim: a step captured as a CUDA graph gives what the same step gives on a CPU.

float32 on both: only a near tie, of two logits or of a uniform, could tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from peagle.engine.engine import Engine
from peagle.progress import shown_by
from peagle.sampling_params import SamplingParams
from peagle.speculation.budget import Counts, DraftBudget, DraftChoice
from tests.tiny import engines, naive
from tests.tiny.displays import Remembering
from tests.tiny.jobs import Job, prompts

from ..test_sampled_distribution import LENGTH, SMALL_VOCAB, check_distribution
from ..test_structured_outputs import EOS, SHAPES, TOKENIZER, greedy, sampled
from ..test_structured_outputs import jobs_of as structured_jobs
from .captured import (
    BATCH,
    CONTEXT,
    CORRECTED,
    HEADS,
    ITEMS,
    OPTIONS,
    K,
    captured_engine,
    captured_shapes,
    exact_engine,
    models,
)

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = [
    SamplingParams(seed=1, max_tokens=14),
    GREEDY,
    SamplingParams(seed=2, temperature=1.4, max_tokens=9),
]
FILTERED = [
    SamplingParams(seed=3, top_k=9, temperature=0.8, max_tokens=14),
    SamplingParams(seed=4, top_p=0.8, temperature=1.4, max_tokens=12),
    GREEDY,
    SamplingParams(seed=5, min_p=0.1, max_tokens=12),
]
NODES = 9
LONG_PROMPT = [1 + n % 37 for n in range(150)]  # ten steps; its attention is divided


@pytest.fixture(scope="module")
def engine_with() -> Callable[[str], Engine]:
    """One engine for each head: each graph is captured once for all tests."""
    return cache(lambda name: captured_engine(*models("cuda", HEADS[name]), "rejection"))


def jobs_of(params: list[SamplingParams], count: int = 12) -> list[Job]:
    """They come one by one, and more than there are slots."""
    texts = prompts(count, seed=1, longest=24)
    return [Job(p, params[n % len(params)], joins=n) for n, p in enumerate(texts)]


def check_captured(engine: Engine, name: str, jobs: list[Job]) -> int:
    """Same tokens, endings and counters as on the CPU; -> how many drafts were accepted."""
    requests, exact = (
        engines.run(engine, jobs),
        engines.run(exact_engine(HEADS[name], "rejection"), jobs),
    )
    assert engines.answers_of(requests) == engines.answers_of(exact)
    assert engines.endings(requests) == engines.endings(exact)
    assert engines.counters(requests) == engines.counters(exact)
    assert {shape.batch for shape in captured_shapes(engine)} == {BATCH}
    return sum(request.stats.num_accepted_tokens for request in requests)


@pytest.mark.parametrize("name", HEADS)
def test_greedy_steps_give_plain_decodings_answers(
    name: str, engine_with: Callable[[str], Engine]
) -> None:
    engine = engine_with(name)
    draft_time = engine.stats.draft_time
    assert check_captured(engine, name, jobs_of([GREEDY])) > 0
    greedy = [s for s in captured_shapes(engine) if s.sampling == "greedy"]
    assert {(s.depth, s.num_items) for s in greedy} >= {(K, 0), (K, ITEMS)}
    assert engine.stats.draft_time == draft_time  # no step was an eager one


@pytest.mark.parametrize("name", HEADS)
def test_a_captured_step_of_prompts_and_decode_rows_gives_plain_decodings_answers(
    name: str, engine_with: Callable[[str], Engine]
) -> None:
    engine = engine_with(name)
    target, _ = models("cpu", HEADS[name])
    jobs = [Job([1, 2, 3], GREEDY), Job(LONG_PROMPT[:60], GREEDY, joins=3)]
    jobs += [Job(p, GREEDY, joins=3 + n) for n, p in enumerate(prompts(4, seed=8))]
    launched, run = [], engine.runner.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine.runner,
            "run",
            lambda shape, slots, caps, chunks, host: (
                launched.append((len(slots), len(chunks))) or run(shape, slots, caps, chunks, host)
            ),
        )
        requests = engines.run(engine, jobs)
    assert sum(slots > 0 and chunks > 0 for slots, chunks in launched) > 3
    expected = [naive.answer(target, job, max_model_len=engine.max_model_len) for job in jobs]
    assert engines.answers_of(requests) == expected
    exact = engines.run(exact_engine(HEADS[name], "rejection"), jobs)
    assert engines.counters(requests) == engines.counters(exact)


@pytest.mark.parametrize("name", HEADS)
def test_eager_steps_for_the_host_run_beside_captured_ones(
    name: str, engine_with: Callable[[str], Engine]
) -> None:
    engine = engine_with(name)
    target, _ = models("cpu", HEADS[name])
    needs = [
        GREEDY,
        dataclasses.replace(GREEDY, logprobs=2),
        dataclasses.replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.3),
        dataclasses.replace(GREEDY, min_tokens=6, stop_token_ids=(3, 4, 5, 6, 7, 8)),
    ]
    jobs, draft_time = jobs_of(needs), engine.stats.draft_time
    requests, exact = (
        engines.run(engine, jobs),
        engines.run(exact_engine(HEADS[name], "rejection"), jobs),
    )
    expected = [naive.answer(target, job, max_model_len=engine.max_model_len) for job in jobs]
    assert engines.answers_of(requests) == expected
    assert engines.counters(requests) == engines.counters(exact)
    for ours, theirs in zip(requests, exact, strict=True):
        assert [x.token_ids[0] for x in ours.logprobs] == [x.token_ids[0] for x in theirs.logprobs]
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert engine.stats.draft_time > draft_time  # eager steps tell draft and verification apart


def test_greedy_steps_with_divided_attention_give_plain_decodings_answers(
    engine_with: Callable[[str], Engine],
) -> None:
    engine = engine_with("p-eagle")
    check_captured(engine, "p-eagle", [*jobs_of([GREEDY], count=3), Job(LONG_PROMPT, GREEDY)])
    assert max(shape.num_splits for shape in captured_shapes(engine)) > 1


def test_steps_without_drafts_beside_prompts_give_plain_decodings_answers(
    engine_with: Callable[[str], Engine],
) -> None:
    engine = engine_with("p-eagle")
    params = dataclasses.replace(GREEDY, num_speculative_tokens=0)
    check_captured(engine, "p-eagle", jobs_of([params], count=24))
    assert 0 in {shape.depth for shape in captured_shapes(engine)}


@pytest.mark.parametrize("kind", ["sampled", "filtered"])
@pytest.mark.parametrize("name", HEADS)
def test_rejection_gives_the_tokens_of_the_step_on_a_cpu(
    name: str, kind: str, engine_with: Callable[[str], Engine]
) -> None:
    engine = engine_with(name)
    assert check_captured(engine, name, jobs_of(SAMPLED if kind == "sampled" else FILTERED)) > 0
    assert (K, kind, True) in {
        (s.depth, s.sampling, s.by_rejection) for s in captured_shapes(engine)
    }


def test_rejection_has_the_targets_distribution() -> None:
    head = HEADS["p-eagle"] | {"draft_vocab_size": SMALL_VOCAB - 1}
    engine = captured_engine(*models("cuda", head, vocab_size=SMALL_VOCAB), "rejection")
    check_distribution(engine, SamplingParams(max_tokens=LENGTH + 1, temperature=1.3), samples=300)
    assert any(shape.by_rejection for shape in captured_shapes(engine))


@pytest.mark.parametrize(
    "params", [[GREEDY], SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"]
)
@pytest.mark.parametrize(
    ("head", "nodes"),
    [(HEADS["p-eagle"], NODES), (CORRECTED, NODES), (CORRECTED, None), (HEADS["eagle3"], NODES)],
    ids=["trees", "corrected trees", "corrected chains", "beams"],
)
def test_captured_lattices_give_the_answers_of_those_on_a_cpu(
    head: dict[str, Any], nodes: int | None, params: list[SamplingParams]
) -> None:
    jobs = jobs_of(params)
    engine = captured_engine(*models("cuda", head), "coupled", nodes)
    requests = engines.run(engine, jobs)
    exact = engines.run(exact_engine(head, "coupled", nodes), jobs)
    assert engines.answers_of(requests) == engines.answers_of(exact)
    assert sum(request.stats.num_accepted_tokens for request in requests) > 0
    assert {shape.num_nodes for shape in captured_shapes(engine)} == {nodes}


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("p-eagle", None), ("eagle3", None), ("p-eagle", NODES), ("eagle3", NODES)],
)
def test_second_turns_by_the_prefix_cache_get_plain_decodings_answers(
    name: str, nodes: int | None
) -> None:
    target, _ = models("cpu", HEADS[name])
    first = [Job(p, GREEDY, joins=n) for n, p in enumerate(prompts(5, seed=2, longest=30))]
    first += [Job(LONG_PROMPT[:60], GREEDY), Job(LONG_PROMPT[:50], GREEDY)]
    answers = [naive.answer(target, job, max_model_len=CONTEXT) for job in first]
    second = [Job([*j.prompt, *a, 1], GREEDY) for j, a in zip(first, answers, strict=True)]
    engine = captured_engine(
        *models("cuda", HEADS[name]), "coupled", nodes, enable_prefix_caching=True
    )
    assert engines.answers_of(engines.run(engine, first)) == answers
    requests = engines.run(engine, second)
    answers = [naive.answer(target, job, max_model_len=CONTEXT) for job in second]
    assert engines.answers_of(requests) == answers
    # The answers end by their limit: the drafter is not sure of its last K + 3 rows.
    for request, job in zip(requests, first, strict=True):
        assert request.num_cached_tokens >= (len(job.prompt) + 14 - K - 3) // 4 * 4
    if nodes is None:  # what the drafter's cache holds is what it would have computed
        exact = engines.run(exact_engine(HEADS[name], "coupled"), second)
        assert engines.counters(requests) == engines.counters(exact)


@pytest.mark.parametrize("nodes", [None, NODES])
def test_structured_outputs_are_those_of_steps_on_a_cpu(nodes: int | None) -> None:
    head, size = HEADS["p-eagle"], {"vocab_size": len(TOKENIZER)}
    params = [f(shape) for shape in SHAPES for f in (greedy, sampled)]
    jobs = structured_jobs([*params, greedy(None, 14), sampled(None, max_tokens=14)])
    engine = captured_engine(*models("cuda", head, **size), "coupled", nodes, EOS)
    exact = engines.make_engine(*models("cpu", head, **size), K, eos=EOS, nodes=nodes, **OPTIONS)
    requests, expected = engines.run(engine, jobs), engines.run(exact, jobs)
    assert engines.answers_of(requests) == engines.answers_of(expected)
    assert engines.endings(requests) == engines.endings(expected)


class Turns(DraftBudget):
    """As many drafts as the last step did not have: all, three, none at all; of trees, every other
    time from rows that all requests share."""

    turn = 0

    def choose(self, slots: Counts, most: Counts, *, may_explore: bool) -> DraftChoice:
        self.turn += 1
        number = (NODES, NODES, 3, 0, 0, 3)[self.turn % 6]
        number = min(number, self.max_nodes or self.max_depth)
        mean = None
        if self.max_nodes is not None and self.turn % 2 and number:
            number, mean = self.max_nodes, number // 2
        caps = np.minimum(most, number)
        return DraftChoice(caps, K if number else 0, number, np.zeros(len(most)), None, mean)


@pytest.mark.parametrize(
    ("name", "nodes"), [("p-eagle", NODES), ("eagle3", None), ("eagle3", NODES)]
)
@pytest.mark.parametrize("params", [[GREEDY], SAMPLED], ids=["greedy", "sampled"])
def test_numbers_of_drafts_that_change_from_step_to_step_leave_the_answers_alone(
    name: str, nodes: int | None, params: list[SamplingParams]
) -> None:
    jobs, target = jobs_of(params), models("cpu", HEADS[name])[0]
    engine = captured_engine(
        *models("cuda", HEADS[name]),
        "coupled",
        nodes,
        auto=True,
        max_num_batched_tokens=BATCH * (NODES + 1),
    )
    assert engine.budget is not None
    engine.budget.__class__ = Turns
    expected = [naive.answer(target, job, max_model_len=CONTEXT) for job in jobs]
    assert engines.answers_of(engines.run(engine, jobs)) == expected
    assert {shape.feeds for shape in captured_shapes(engine)} == {True, False}


@pytest.mark.parametrize(
    ("name", "nodes"), [("p-eagle", None), ("p-eagle", NODES), ("eagle3", NODES)]
)
def test_layers_with_block_tables_of_their_own_give_plain_decodings_answers(
    name: str, nodes: int | None
) -> None:
    target, head = {"sliding_windows": (8, None)}, HEADS[name]
    jobs = [*jobs_of([GREEDY], count=6), Job(LONG_PROMPT, GREEDY), Job(LONG_PROMPT[:60], GREEDY)]
    exact, _ = models("cpu", head, **target)
    expected = [naive.answer(exact, job, max_model_len=CONTEXT) for job in jobs]
    engine = captured_engine(*models("cuda", head, **target), "coupled", nodes)
    assert len(engine.runner.models.state.block_tables) > 1
    assert engines.answers_of(engines.run(engine, jobs)) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_other_depths_than_the_engines_give_plain_decodings_answers(depth: int) -> None:
    params = dataclasses.replace(GREEDY, num_speculative_tokens=depth)
    target, jobs = models("cpu", HEADS["p-eagle"])[0], jobs_of([params])
    expected = [naive.answer(target, job, max_model_len=CONTEXT) for job in jobs]
    engine = captured_engine(*models("cuda", HEADS["p-eagle"]), "coupled", NODES)
    assert engines.answers_of(engines.run(engine, jobs)) == expected
    assert depth in {shape.depth for shape in captured_shapes(engine)}


def test_after_a_warm_up_greedy_requests_capture_nothing() -> None:
    engine = captured_engine(*models("cuda", HEADS["p-eagle"]), "coupled")
    display = Remembering()
    with shown_by(display):
        engine.warm_up()
    captured = captured_shapes(engine)
    work = display.work("capturing CUDA graphs")
    assert work.done == work.total == len(captured)
    engines.run(engine, jobs_of([GREEDY]))
    assert captured_shapes(engine) == captured

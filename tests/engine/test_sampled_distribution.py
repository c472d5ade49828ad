"""Claim 2: sampled output is the target's: its tokens (coupled), its distribution (rejection)."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.engine import Engine
from peagle.models.drafter import Drafter
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.sampling import SamplingRows, filter_logits, probabilities
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

PROMPTS = prompts(3, seed=11)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(torch.float64)


def drafter_named(name: str, known: list[list[int]]) -> Drafter | None:
    makers: dict[str, Any] = {
        "plain": lambda: None,
        "oracle": lambda: drafters.oracle(known),
        "mixed": lambda: drafters.mixed(known),
        "ngram": lambda: NgramDrafter(1, 3),
        "p-eagle": lambda: head_drafter(SHALLOW.make_head(target(), draft_vocab_size=25)),
        "eagle3": lambda: head_drafter(SHALLOW.make_head(target(), "eagle3")),
    }
    return makers[name]()


MODES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.8},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": -1.5},
    "logit bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "bad words": {"bad_word_ids": [[7], [2, 3], [1, 2, 4]]},
    "min tokens": {"min_tokens": 9, "eos": (1, 2, 3, 4, 5, 6, 7, 8)},
    "stop ids": {"stop_token_ids": [9, 10, 11], "min_tokens": 4},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
}


def job_of(prompt: list[int], mode: dict[str, Any], seed: int) -> Job:
    mode = dict(mode)
    words, eos = mode.pop("bad_word_ids", ()), mode.pop("eos", ())
    params = SamplingParams(**{"seed": seed, "max_tokens": 14} | mode)
    return Job(prompt, params, bad_word_ids=words, eos=eos)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("mode", MODES)
def test_a_seed_gives_the_plain_tokens_with_every_drafter(mode: str, static: bool) -> None:
    jobs = [job_of(p, MODES[mode], seed=31 + n) for n, p in enumerate(PROMPTS)]
    expected = [naive.answer(target(), job) for job in jobs]
    known = [j.prompt + a for j, a in zip(jobs, expected, strict=True)]
    for name in ("plain", "oracle", "mixed", "ngram", "p-eagle", "eagle3"):
        engine = engines.make_engine(
            target(), drafter_named(name, known), 5, eos=jobs[0].eos, static=static
        )
        assert engines.answers_of(engines.run(engine, jobs)) == expected, name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_banned_where_drafts_of_the_same_step_began_it(temperature: float) -> None:
    """The drafter wants to say the very words that are banned."""
    free = job_of(PROMPTS[0], {"temperature": temperature}, seed=8)
    wanted = naive.answer(target(), free)
    words = [wanted[n : n + size] for n, size in ((1, 2), (4, 3), (8, 2))]
    job = free._replace(bad_word_ids=words)
    expected = naive.answer(target(), job)
    assert expected != wanted
    for known in (wanted, expected):
        engine = engines.make_engine(target(), drafters.oracle([job.prompt + known]), 16)
        assert engines.run(engine, [job])[0].output_token_ids == expected


@st.composite
def modes(draw: st.DrawFn) -> dict[str, Any]:
    token = st.integers(0, VOCAB - 1)
    return {
        "temperature": draw(st.sampled_from([0.0, 0.5, 1.0, 1.7])),
        "top_k": draw(st.sampled_from([-1, 0, 1, 8, 100])),
        "top_p": draw(st.sampled_from([1.0, 0.9, 0.4])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 0.5])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.7, 1.9])),
        "presence_penalty": draw(st.sampled_from([0.0, -1.0, 2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, -0.5, 1.0])),
        "logit_bias": draw(st.dictionaries(token, st.floats(-5, 5), max_size=3)),
        "bad_word_ids": draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=4)),
        "eos": tuple(draw(st.lists(token, max_size=4))),
        "min_tokens": draw(st.integers(0, 14)),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.lists(token, max_size=2)),
    }


@pytest.mark.slow
@settings(max_examples=20)
@given(
    modes(),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["mixed", "ngram", "p-eagle", "eagle3"]),
    st.integers(1, 16),
    st.booleans(),
)
def test_a_seed_gives_the_plain_tokens_in_any_combination_of_modes(
    mode: dict[str, Any], seed: int, drafter: str, k: int, static: bool
) -> None:
    job = job_of(PROMPTS[0], mode, seed)
    expected = naive.answer(target(), job)
    other = job_of(PROMPTS[1], {}, seed=1)  # a neighbour of another kind
    known = [job.prompt + expected]
    engine = engines.make_engine(
        target(), drafter_named(drafter, known), k, eos=job.eos, static=static
    )
    assert engines.run(engine, [job, other])[0].output_token_ids == expected


@both_forms
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_drafts_from_the_targets_own_distribution_are_all_accepted(
    verification: Any, static: bool
) -> None:
    """Draft and target must use the same noise at the same position (coupled), and the
    distribution that is verified must be the one that was drawn from (rejection)."""
    for mode in ({}, {"temperature": 0.6, "top_k": 9}, {"top_p": 0.7, "min_p": 0.02}):
        jobs = [job_of(p, mode, seed=3 + n) for n, p in enumerate(PROMPTS)]
        drafter = drafters.TargetAsDrafter(target(), jobs, keeps_probs=verification == "rejection")
        engine = engines.make_engine(
            target(), drafter, 4, verification, max_num_batched_tokens=16, static=static
        )
        engines.run(engine, jobs)
        assert engine.stats.num_draft_tokens >= 20
        assert engine.stats.acceptance_rate == 1.0


SMALL_VOCAB = 4


@cache
def small_target() -> TargetModel:
    return SHALLOW.make_target(torch.float32, vocab_size=SMALL_VOCAB)


def exact_distribution(
    prompt: list[int], length: int, params: SamplingParams
) -> dict[tuple[int, ...], float]:
    rows = SamplingRows(
        torch.tensor([params.temperature]),
        torch.tensor([max(params.top_k, 0)]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
    )
    out = {}
    for tokens in product(range(SMALL_VOCAB), repeat=length):
        logits = naive.logits_of(small_target(), [*prompt, *tokens])[len(prompt) - 1 : -1]
        mass = 1.0
        for row, token in zip(logits, tokens, strict=True):
            mass *= float(probabilities(filter_logits(row[None], rows))[0, token])
        out[tokens] = mass
    return out


def deviation(seen: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Chi-square of the counts, in standard deviations from its mean; rare cells are merged."""
    total = sum(seen.values())
    common = [t for t, p in exact.items() if p * total >= 5]
    cells = [(seen[t], exact[t] * total) for t in common]
    cells.append((total - sum(n for n, _ in cells), total - sum(e for _, e in cells)))
    chi2 = sum((n - e) ** 2 / e for n, e in cells if e > 1)
    freedom = len(cells) - 1
    return (chi2 - freedom) / math.sqrt(2 * freedom)


PROMPT, LENGTH = [1, 2, 0, 3, 1, 2, 0], 3
# Of the head, so that some drafts are accepted and some not; of requests.
CASES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "p-eagle": ({}, {}),
    "p-eagle, reduced vocabulary": ({"draft_vocab_size": 3}, {"temperature": 1.3}),
    "eagle3, filtered": ({"method": "eagle3", "seed": 4}, {"temperature": 0.8, "top_k": 3}),
    "ngram": (None, {"temperature": 1.2, "min_p": 0.05}),
}


def check_distribution(engine: Engine, params: SamplingParams, samples: int) -> int:
    """Requests without a seed, every third one greedy; -> how many of them were preempted."""
    greedy = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
    requests = [
        engine.add_request(str(n), PROMPT, params if n % 3 else greedy)
        for n in range(samples * 3 // 2)
    ]
    while engine.has_unfinished:
        engine.step()
    assert 0.05 < engine.stats.acceptance_rate < 0.98  # both branches were taken
    assert len({tuple(r.output_token_ids) for r in requests[::3]}) == 1
    sampled = [r for n, r in enumerate(requests) if n % 3]
    seen = Counter(tuple(r.output_token_ids[:LENGTH]) for r in sampled)
    exact = exact_distribution(PROMPT, LENGTH, params)
    assert all(exact[tokens] > 0 for tokens in seen)
    assert abs(deviation(seen, exact)) < 5
    return sum(r.num_preemptions > 0 for r in requests)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", CASES)
def test_rejection_beside_greedy_requests_has_the_targets_distribution(
    name: str, static: bool
) -> None:
    head, mode = CASES[name]
    drafter: Drafter = NgramDrafter(1, 3)
    if head is not None:
        drafter = head_drafter(SHALLOW.make_head(small_target(), **head))
    engine = engines.make_engine(
        small_target(), drafter, 2, "rejection", max_num_seqs=64, static=static
    )
    # One token more than is looked at, so that the last of them is drafted for, too.
    check_distribution(engine, SamplingParams(max_tokens=LENGTH + 1, **mode), 1000)


@pytest.mark.slow
@both_forms
def test_preemption_leaves_the_distribution_alone(static: bool) -> None:
    """What a step in flight would have given is lost, and drawn again."""
    drafter = head_drafter(SHALLOW.make_head(small_target()))
    options = {"max_num_seqs": 64, "max_model_len": 24, "block_size": 1}
    options |= engines.room_for(150, small_target(), drafter)
    engine = engines.make_engine(small_target(), drafter, 2, "rejection", static=static, **options)
    assert check_distribution(engine, SamplingParams(max_tokens=LENGTH + 6), 300) > 30


def test_rejection_with_a_seed_repeats_itself() -> None:
    jobs = [job_of(p, {}, seed=n) for n, p in enumerate(PROMPTS)]
    runs = []
    for _ in range(2):
        drafter = head_drafter(SHALLOW.make_head(target()))
        engine = engines.make_engine(target(), drafter, 4, "rejection")
        runs.append(engines.answers_of(engines.run(engine, jobs)))
    assert runs[0] == runs[1]


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them() -> None:
    jobs = [Job(PROMPTS[0], SamplingParams(max_tokens=12))] * 3
    runs = [
        engines.answers_of(engines.run(engines.make_engine(target(), seed=s), jobs))
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert len({tuple(a) for a in runs[0] + runs[2]}) == 6

"""Claim 1: greedy speculative output equals the plain target's, token for token."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

PROMPTS = prompts(5, seed=3)
DRAFTERS = ["oracle", "wrong", "random", "mixed", "one", "none", "ngram"]


@cache
def target(dtype: torch.dtype = torch.float32) -> TargetModel:
    return SHALLOW.make_target(dtype)


@cache
def plain(dtype: torch.dtype = torch.float32) -> list[list[int]]:
    return [naive.answer(target(dtype), Job(p, GREEDY)) for p in PROMPTS]


def scripted(name: str, dtype: torch.dtype = torch.float32) -> Drafter:
    known = [p + a for p, a in zip(PROMPTS, plain(dtype), strict=True)]
    makers = {
        "oracle": lambda: drafters.oracle(known),
        "wrong": lambda: drafters.always_wrong(known),
        "random": drafters.random_drafts,
        "mixed": lambda: drafters.mixed(known),
        "one": lambda: drafters.few(known, 1),
        "none": lambda: drafters.few(known, 0),
        "ngram": lambda: NgramDrafter(1, 3),
    }
    return makers[name]()


@both_forms
def test_the_plain_engine_equals_a_loop_that_recomputes_every_prefix(static: bool) -> None:
    engine = engines.make_engine(target(), static=static)
    requests = engines.run(engine, [Job(p, GREEDY) for p in PROMPTS])
    assert engines.answers_of(requests) == plain()
    assert len({tuple(a) for a in plain()}) == len(PROMPTS)  # the oracle is not trivial
    assert all(len(set(a)) > 3 for a in plain())


@both_forms
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5, 16])
def test_any_scripted_drafter_leaves_greedy_output_unchanged(
    name: str, k: int, static: bool
) -> None:
    engine = engines.make_engine(target(), scripted(name), k, static=static)
    requests = engines.run(engine, [Job(p, GREEDY) for p in PROMPTS])
    assert engines.answers_of(requests) == plain()


def test_an_oracle_is_always_accepted_and_a_wrong_drafter_never() -> None:
    for name, rate in (("oracle", 1.0), ("wrong", 0.0)):
        engine = engines.make_engine(target(), scripted(name), 4)
        engines.run(engine, [Job(p, GREEDY) for p in PROMPTS])
        assert engine.stats.num_draft_tokens > 0
        assert engine.stats.acceptance_rate == rate
    # The first token comes from prefill; of the 19 others, four drafts and a bonus a step.
    assert engine.stats.num_steps == 5 * 20
    engine = engines.make_engine(target(), scripted("oracle"), 4)
    engines.run(engine, [Job(p, GREEDY) for p in PROMPTS])
    assert engine.stats.num_steps == 5 * (1 + 4)


HEADS: dict[str, dict[str, Any]] = {
    "p-eagle, 1 layer": {},
    "p-eagle, 2 layers": {"num_hidden_layers": 2},
    "p-eagle, 4 layers": {"num_hidden_layers": 4},
    "p-eagle, own tables": {"has_embed_tokens": True, "has_lm_head": True},
    "p-eagle, reduced vocabulary": {"draft_vocab_size": 13},
    "p-eagle, reduced, own table": {"draft_vocab_size": 13, "has_lm_head": True},
    "p-eagle, norm before residual": {"norm_before_residual": True, "num_hidden_layers": 2},
    "eagle3": {"method": "eagle3"},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True},
    "eagle3, reduced vocabulary": {"method": "eagle3", "draft_vocab_size": 13},
}


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize(
    ("name", "k"),
    [*((name, 7) for name in HEADS)]
    + [(name, k) for name in ("p-eagle, 2 layers", "eagle3") for k in (1, 2, 16)],
)
def test_any_head_leaves_greedy_output_unchanged(name: str, k: int, static: bool) -> None:
    drafter = head_drafter(SHALLOW.make_head(target(), **HEADS[name]))
    engine = engines.make_engine(target(), drafter, k, static=static)
    requests = engines.run(engine, [Job(p, GREEDY) for p in PROMPTS])
    assert engines.answers_of(requests) == plain()


def knowing_head() -> drafters.ScriptedHead:
    """Drafts of any number are right."""
    script = drafters.Script([p + a for p, a in zip(PROMPTS, plain(), strict=True)])
    return drafters.ScriptedHead(SHALLOW.make_head(target()), script)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "ngram", "p-eagle, 2 layers", "eagle3"])
@settings(max_examples=12)
@given(data=st.data())
def test_greedy_output_is_unchanged_in_batches_that_change_at_every_step(
    name: str, data: st.DataObject
) -> None:
    drafter = (
        head_drafter(SHALLOW.make_head(target(), **HEADS[name]))
        if name in HEADS
        else scripted(name)
    )
    jobs, expected = [], []
    for prompt, answer in zip(PROMPTS, plain(), strict=True):
        length = data.draw(st.integers(1, 20), label="max_tokens")
        drafts = data.draw(st.sampled_from([None, 0, 1, 3, 16]), label="k")
        joins = data.draw(st.integers(0, 12), label="joins")
        params = dataclasses.replace(GREEDY, max_tokens=length, num_speculative_tokens=drafts)
        jobs.append(Job(prompt, params, joins))
        expected.append(answer[:length])
    engine = engines.make_engine(
        target(),
        drafter,
        data.draw(st.integers(1, 16), label="engine k"),
        max_num_seqs=data.draw(st.integers(1, 5), label="max_num_seqs"),
        max_num_batched_tokens=data.draw(st.integers(1, 24), label="budget"),
        block_size=data.draw(st.sampled_from([1, 3, 16]), label="block_size"),
        static=data.draw(st.booleans(), label="static"),
    )
    assert engines.answers_of(engines.run(engine, jobs)) == expected


@both_forms
def test_a_request_without_speculation_is_never_drafted_for(static: bool) -> None:
    params = dataclasses.replace(GREEDY, num_speculative_tokens=0)
    drafter = head_drafter(SHALLOW.make_head(target()))
    engine = engines.make_engine(target(), drafter, 4, static=static)
    jobs = [Job(PROMPTS[0], params), Job(PROMPTS[1], GREEDY)]
    off, on = engines.run(engine, jobs)
    assert engines.answers_of([off, on]) == plain()[:2]
    assert off.stats.num_draft_tokens == 0
    assert on.stats.num_draft_tokens > 0


@both_forms
def test_greedy_requests_are_unchanged_next_to_sampled_ones(static: bool) -> None:
    sampled = SamplingParams(temperature=1.3, top_p=0.9, seed=5, max_tokens=20)
    jobs = [Job(p, GREEDY if n % 2 else sampled, joins=n) for n, p in enumerate(PROMPTS)]
    for verification in ("coupled", "rejection"):
        drafter = head_drafter(SHALLOW.make_head(target()))
        engine = engines.make_engine(target(), drafter, 4, verification, static=static)
        answers = engines.answers_of(engines.run(engine, jobs))
        assert answers[1::2] == plain()[1::2]


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("windows", [(4, 4), (None, 6), (1, None)])
def test_sliding_windows_are_kept_under_speculation(
    windows: tuple[int | None, ...], static: bool
) -> None:
    model = SHALLOW.make_target(torch.float64, sliding_windows=windows)
    jobs = [Job(p, GREEDY) for p in [*PROMPTS, list(range(30))]]
    expected = [naive.answer(model, job) for job in jobs]
    known = [j.prompt + a for j, a in zip(jobs, expected, strict=True)]
    for budget in (64, 8):  # long prompts whole and in chunks
        engine = engines.make_engine(
            model, drafters.mixed(known), 6, max_num_batched_tokens=budget, static=static
        )
        assert engines.answers_of(engines.run(engine, jobs)) == expected


@both_forms
@pytest.mark.parametrize("name", ["oracle", "p-eagle, 1 layer"])
def test_a_stop_token_among_accepted_drafts_ends_the_request_there(name: str, static: bool) -> None:
    answer = plain()[0]
    end = answer[7]
    first = answer.index(end)
    drafter = scripted(name) if name == "oracle" else knowing_head()
    engine = engines.make_engine(target(), drafter, 16, eos=[end], static=static)
    by_eos, by_id, ignoring = engines.run(
        engine,
        [
            Job(PROMPTS[0], dataclasses.replace(GREEDY, ignore_eos=False)),
            Job(PROMPTS[0], dataclasses.replace(GREEDY, stop_token_ids=[end])),
            Job(PROMPTS[0], GREEDY),
        ],
    )
    assert by_eos.output_token_ids == by_id.output_token_ids == answer[: first + 1]
    if name == "oracle":  # drafts behind the end are not counted as accepted
        assert by_eos.stats.num_accepted_tokens == by_id.stats.num_accepted_tokens == first
    assert (by_eos.finish_reason, by_eos.stop_reason) == ("stop", None)
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", end)
    assert ignoring.output_token_ids == answer
    assert ignoring.finish_reason == "length"

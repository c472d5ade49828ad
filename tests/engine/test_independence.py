"""Claim 3: tokens depend on nothing but the request: not on neighbours, preemption or joining."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter

PROMPTS = prompts(6, seed=21, longest=24)
MODES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 4},
    {"seed": 5, "top_p": 0.8, "repetition_penalty": 1.3},
]
JOBS = [
    Job(p, SamplingParams(**{"max_tokens": 16} | MODES[n % len(MODES)]))
    for n, p in enumerate(PROMPTS)
]


@cache
def target() -> TargetModel:
    return SHALLOW.make_target(torch.float64)


@cache
def expected() -> list[list[int]]:
    return [naive.answer(target(), job) for job in JOBS]


def drafter_named(name: str) -> Drafter | None:
    if name == "plain":
        return None
    if name == "mixed":
        known = [j.prompt + a for j, a in zip(JOBS, expected(), strict=True)]
        return drafters.mixed(known)
    return head_drafter(SHALLOW.make_head(target(), name))


@pytest.mark.slow
@settings(max_examples=25)
@given(
    name=st.sampled_from(["plain", "mixed", "p-eagle", "eagle3"]),
    chosen=st.sets(st.integers(0, len(JOBS) - 1), min_size=1),
    joins=st.lists(st.integers(0, 10), min_size=len(JOBS), max_size=len(JOBS)),
    k=st.integers(1, 10),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    block_size=st.sampled_from([1, 2, 5, 16]),
    spare=st.integers(0, 40),
    static=st.booleans(),
)
def test_tokens_depend_on_the_request_alone(
    name: str,
    chosen: set[int],
    joins: list[int],
    k: int,
    budget: int,
    seqs: int,
    block_size: int,
    spare: int,
    static: bool,
) -> None:
    drafter = drafter_named(name)
    longest = -(-40 // block_size) * block_size
    engine = engines.make_engine(
        target(),
        drafter,
        k,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        max_model_len=40,
        static=static,
        **engines.room_for(longest + spare, target(), drafter),
    )
    order = sorted(chosen, key=lambda n: joins[n])
    requests = engines.run(engine, [JOBS[n]._replace(joins=joins[n]) for n in order])
    assert engines.answers_of(requests) == [expected()[n] for n in order]


@pytest.mark.slow
@both_forms
def test_chunked_prefill_gives_the_tokens_of_whole_prompts(static: bool) -> None:
    long = Job([n % VOCAB for n in range(70)], SamplingParams(temperature=0.0, max_tokens=8))
    answer = naive.answer(target(), long)
    for budget in (4, 7, 18, 40, 69, 70, 128):
        drafter = head_drafter(SHALLOW.make_head(target(), num_hidden_layers=2))
        engine = engines.make_engine(
            target(), drafter, 3, max_num_batched_tokens=budget, max_num_seqs=3, static=static
        )
        requests = engines.run(engine, [JOBS[0], long])
        assert engines.answers_of(requests) == [expected()[0], answer], budget


def test_a_step_never_has_more_rows_than_max_num_batched_tokens() -> None:
    engine = engines.make_engine(target(), drafter_named("mixed"), 4, max_num_batched_tokens=3)
    rows: list[int] = []
    run = engine.target.run

    def counting(x: torch.Tensor, *rest: Any) -> Any:
        rows.append(len(x))
        return run(x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.target, "run", counting)
        requests = engines.run(engine, JOBS)
    assert max(rows) == 3
    assert engines.answers_of(requests) == expected()


def test_tokens_are_the_same_where_blocks_are_scattered() -> None:
    """So short of blocks that reservations are taken by others: caches are gathered."""
    room = engines.room_for(60, target(), None)
    engine = engines.make_engine(target(), None, block_size=1, max_model_len=40, **room)
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(JOBS)]
    in_one_piece = set()
    while engine.has_unfinished:
        engine.step()
        in_one_piece |= {r.table.contiguous for r in requests if r.table is not None}
    assert in_one_piece == {True, False}
    assert engines.answers_of(requests) == expected()

"""Few blocks, few slots: requests are preempted, wait, and still say the same."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.models.drafter import Drafter
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW

LONGEST = 40
SAMPLED = SamplingParams(seed=4, top_k=12, max_tokens=20, ignore_eos=True)
BIASED = dataclasses.replace(GREEDY, logit_bias={3: 2.0})  # takes the host's steps


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def network(method: str) -> EagleNetwork:
    return SHALLOW.make_head(target(), method)


def drafter_named(name: str, jobs: list[Job], seed: int = 0) -> Drafter | None:
    if name == "plain":
        return None
    known = naive.known(target(), jobs)
    if name == "on the host":
        return drafters.mixed(known, seed)
    return drafters.ScriptedHead(network(name), drafters.Script(known, seed))


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", ["plain", "on the host", "p-eagle", "eagle3"])
@pytest.mark.parametrize("spare", [0, 8, 20])
def test_preempted_requests_say_the_same(name: str, spare: int, static: bool) -> None:
    params = [GREEDY, SAMPLED, BIASED]
    texts = prompts(6, seed=7, longest=16)
    jobs = [Job(p, params[n % 3], joins=n // 2) for n, p in enumerate(texts)]
    drafter = drafter_named(name, jobs)
    room = engines.room_for(LONGEST + spare, target(), drafter)
    options = {"block_size": 2, "max_model_len": LONGEST} | room
    engine = engines.make_engine(target(), drafter, 5, static=static, **options)
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert sum(r.num_preemptions for r in requests) > 0
    assert requests[0].num_preemptions == 0  # the oldest never is


def test_a_request_is_preempted_while_its_steps_are_in_flight() -> None:
    room = engines.room_for(44, target(), None) | {"max_model_len": LONGEST}
    engine = engines.make_engine(target(), block_size=1, static=True, **room)
    old, young = (engine.add_request(str(n), [n + 1] * 10, GREEDY) for n in range(2))
    in_flight = 0
    while engine.has_unfinished:
        slot = engine.scheduler.slot_of(young)
        before = 0 if slot is None else int(engine.scheduler.batch.in_flight[slot.index])
        engine.step()
        if slot is not None and slot.closed and young.finish_reason is None:
            in_flight += before
    assert in_flight > 0
    assert young.num_preemptions > 0
    naive.check(target(), [old, young], [Job([n + 1] * 10, GREEDY) for n in range(2)])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    k=st.integers(1, 7),
    spare=st.integers(0, 30),
    seqs=st.integers(1, 5),
    block_size=st.sampled_from([1, 3, 8]),
    method=st.sampled_from(["p-eagle", "eagle3"]),
    static=st.booleans(),
)
def test_answers_are_the_same_under_any_shortage_of_blocks(
    seed: int, k: int, spare: int, seqs: int, block_size: int, method: str, static: bool
) -> None:
    texts = prompts(5, seed, longest=20)
    jobs = [Job(p, dataclasses.replace(GREEDY, max_tokens=4 * n + 1)) for n, p in enumerate(texts)]
    drafter = drafter_named(method, jobs, seed)
    blocks = -(-(LONGEST + spare) // block_size)
    options = {"max_num_seqs": seqs, "block_size": block_size, "max_model_len": LONGEST}
    options |= engines.room_for(blocks * block_size, target(), drafter)
    engine = engines.make_engine(target(), drafter, k, static=static, **options)
    naive.check(target(), engines.run(engine, jobs), jobs)


@both_forms
def test_more_requests_than_slots_are_all_answered(static: bool) -> None:
    jobs = [Job(p, dataclasses.replace(GREEDY, max_tokens=5)) for p in prompts(7)]
    drafter = drafter_named("eagle3", jobs)
    engine = engines.make_engine(target(), drafter, 2, max_num_seqs=2, static=static)
    naive.check(target(), engines.run(engine, jobs), jobs)


@both_forms
def test_a_stream_of_requests_does_not_starve_one_that_needs_many_blocks(static: bool) -> None:
    """Three that never end together leave too few blocks free at any time."""
    room = engines.room_for(66, target(), None) | {"max_model_len": LONGEST}
    engine = engines.make_engine(target(), block_size=1, static=static, **room)
    patient = None
    for n in range(80):
        if n % 4 == 0:
            engine.add_request(str(n), [3] * 10, dataclasses.replace(GREEDY, max_tokens=12))
        if n == 12:
            params = dataclasses.replace(GREEDY, logprobs=1, max_tokens=3)
            patient = engine.add_request("long", [2] * 37, params)
        engine.step()
    assert patient is not None
    assert patient.num_outputs == 3

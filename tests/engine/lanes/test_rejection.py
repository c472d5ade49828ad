"""Claim: by rejection, too, lanes give the plain step's tokens and counters for a seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peagle.engine.lanes.seats import Seat

from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams

from .. import tiny
from ..tiny import GREEDY, Job
from .lane_tiny import (
    check_naive,
    check_same,
    idle,
    lane_drafts,
    lane_engine,
)
from .test_equals_plain import HEADS, MODES, head, jobs_of, target, workloads
from .test_preemption import LONGEST, room_for


def both(name: str, k: int, **options: Any) -> tuple[Any, Engine]:
    lanes = lane_engine(target(), head(name), k, "rejection", **options)
    return lanes, tiny.make_engine(target(), head(name), k, "rejection", **options)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "greedy"])
@pytest.mark.parametrize("name", HEADS)
def test_a_seed_gives_the_plain_steps_tokens(name: str, mode: str) -> None:
    k = 1 + list(HEADS).index(name) % 3 * 3  # 1, 4, 7
    jobs = jobs_of(mode)
    lanes, plain = both(name, k)
    requests = check_same(lanes, plain, jobs)
    greedy = [n for n, job in enumerate(jobs) if job.params.greedy]
    check_naive(target(), [requests[n] for n in greedy], [jobs[n] for n in greedy])
    shapes = lane_drafts(lanes).decode_shapes
    assert any(shape.by_rejection for shape in shapes)
    assert lanes.stats.draft_time == 0.0  # nobody took the plain step


def test_drafts_are_accepted_and_refused_at_every_depth() -> None:
    """Else the tests above would compare little."""
    jobs = [Job(p, SamplingParams(seed=n, max_tokens=30)) for n, p in enumerate(tiny.prompts(6))]
    for name in ("p-eagle", "eagle3"):
        lanes, plain = both(name, 3)
        check_same(lanes, plain, jobs)
        drafted = lanes.stats.num_draft_tokens_per_pos
        accepted = lanes.stats.num_accepted_tokens_per_pos
        assert all(0 < a < d for d, a in zip(drafted, accepted, strict=True))


def test_greedy_requests_alone_take_the_greedy_graph() -> None:
    jobs = jobs_of("greedy")
    lanes, plain = both("p-eagle", 3)
    check_naive(target(), check_same(lanes, plain, jobs), jobs)
    steps = lane_drafts(lanes)
    assert not any(shape.by_rejection for shape in (*steps.decode_shapes, *steps.prefill_shapes))


def test_requests_for_the_plain_step_are_judged_alike() -> None:
    """With logprobs or without, a request says the same, whichever step it takes."""
    params = SamplingParams(seed=6, top_p=0.9, max_tokens=14)
    texts = tiny.prompts(4, seed=3)
    jobs = [Job(p, dataclasses.replace(params, logprobs=2)) for p in texts]
    jobs += [Job(p, params) for p in texts]
    lanes, plain = both("eagle3", 4)
    requests = check_same(lanes, plain, jobs)
    answers = tiny.answers_of(requests)
    assert answers[:4] == answers[4:]
    assert idle(lanes)


@settings(max_examples=12, deadline=None)
@given(workloads(), st.integers(1, 8), st.sampled_from([1, 3, 4, 16]))
def test_any_workload(work: tuple[str, int, list[Job]], seqs: int, block_size: int) -> None:
    name, k, jobs = work
    lanes, plain = both(name, k, max_num_seqs=seqs, block_size=block_size)
    requests = check_same(lanes, plain, jobs)
    greedy = [n for n, job in enumerate(jobs) if job.params.greedy]
    check_naive(target(), [requests[n] for n in greedy], [jobs[n] for n in greedy])


@pytest.mark.parametrize("name", ["p-eagle", "eagle3, reduced vocabulary"])
def test_requests_go_on_beyond_the_drafters_positions(name: str) -> None:
    short = tiny.head_drafter(tiny.make_head(target(), **HEADS[name], max_position_embeddings=24))
    params = SamplingParams(seed=8, max_tokens=40, ignore_eos=True)
    jobs = [Job(p, params) for p in tiny.prompts(3, seed=2)]
    lanes = lane_engine(target(), short, 4, "rejection")
    check_same(lanes, tiny.make_engine(target(), short, 4, "rejection"), jobs)


# --- preemption: what is lost in flight may be drawn otherwise, but never by chance


def run_sent_back_at(engine: Engine, jobs: list[Job], places: list[set[int]]) -> list[Request]:
    """The plain engine; sends each request back once it has said so many tokens."""
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    left = [set(p) for p in places]
    while engine.has_unfinished:
        for request, outputs in zip(requests, left, strict=True):
            if request in engine.scheduler.running and request.num_outputs in outputs:
                outputs.remove(request.num_outputs)
                engine.scheduler._preempt(request)
        engine.step()
    return requests


@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("spare", [0, 8, 14])
def test_a_preempted_request_says_what_the_plain_one_says_if_sent_back_there(
    name: str, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [GREEDY, SamplingParams(seed=4, top_k=12, max_tokens=20, ignore_eos=True)]
    texts = tiny.prompts(6, seed=7, longest=16)
    jobs = [Job(p, params[n % 2]) for n, p in enumerate(texts)]
    lanes = lane_engine(
        target(), head(name), 5, "rejection", block_size=2, **room_for(LONGEST + spare, head(name))
    )
    places: list[set[int]] = [set() for _ in jobs]
    send_back = lanes.seating._send_back

    def noted(seat: Seat) -> None:
        places[int(seat.request.request_id)].add(seat.request.num_outputs)
        send_back(seat)

    monkeypatch.setattr(lanes.seating, "_send_back", noted)
    ours = tiny.run(lanes, jobs)
    assert any(places[n] for n in (1, 3, 5))
    roomy = tiny.make_engine(target(), head(name), 5, "rejection")
    theirs = run_sent_back_at(roomy, jobs, places)
    assert tiny.answers_of(ours) == tiny.answers_of(theirs)
    check_naive(target(), ours[::2], jobs[::2])  # the greedy ones, wherever they were sent back
    assert idle(lanes)

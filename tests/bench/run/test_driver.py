"""Closed and open loops: how many run at once, and from when a latency counts."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.bench.run.driver import Load, arrivals
from peagle.bench.run.measure import measure
from peagle.bench.workloads.prompter import messages, raw_text
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError

from .fakes import FakeClient, run


def tasks(count: int, turns: int = 1) -> list[Task]:
    return [Task(f"t{n}", tuple(f"turn {m}" for m in range(turns))) for n in range(count)]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 3))
def test_closed_loop_keeps_exactly_so_many_streams(count: int, streams: int, turns: int) -> None:
    client = FakeClient()
    outcome = run(client, tasks(count, turns), Load(concurrency=streams))
    assert client.most_open == min(count, streams)
    assert sorted(client.started) == [(f"t{n}", m) for n in range(count) for m in range(turns)]
    assert all(r.answer is not None and r.counts == [1, 2, 3] for r in outcome.records)
    # No stream idles: all conversations together take the fewest steps possible.
    assert client.num_steps == -(-count // streams) * turns * 3


def test_second_turn_holds_the_methods_own_first_answer() -> None:
    client = FakeClient()
    run(client, tasks(2, turns=2), Load(concurrency=1))
    assert client.prompts == ["turn 0", "turn 0|answer t0.0", "turn 0", "turn 0|answer t1.0"]


def test_messages_alternate_and_end_with_the_turn_that_is_due() -> None:
    task = Task("t", ("one", "two"), system="be kind")
    assert [m["role"] for m in messages(task, ["1"])] == ["system", "user", "assistant", "user"]
    assert messages(task, ["1"])[-1]["content"] == "two"
    assert raw_text(task, ["1"]) == "be kind\none\n1\ntwo"


def test_latency_of_an_open_loop_counts_from_the_scheduled_arrival() -> None:
    # The backend stalls 100 s in its first step; all ten others were due meanwhile.
    client = FakeClient(lambda n: 100.0 if n == 0 else 0.01)
    outcome = run(client, tasks(11), Load(request_rate=1.0))
    first, *others = outcome.records
    due = arrivals(11, 1.0, seed=0)
    assert [r.begun for r in outcome.records] == due
    assert first.times[0] - first.begun > 99
    delays = [r.times[0] - r.begun for r in others]
    expected = [first.begun + 100.01 - begun for begun in due[1:]]  # the queue shows, in full
    assert delays == pytest.approx(expected, abs=0.05)
    ttft = measure(outcome).latencies.ttft
    assert ttft is not None
    assert ttft.p50 > 80


def test_closed_loop_counts_from_the_start_and_would_have_hidden_the_stall() -> None:
    client = FakeClient(lambda n: 100.0 if n == 0 else 0.01)
    outcome = run(client, tasks(11), Load(concurrency=1))
    ttft = measure(outcome).latencies.ttft
    assert ttft is not None
    assert ttft.p50 == pytest.approx(0.01)


def test_open_loop_does_not_wait_for_answers() -> None:
    client = FakeClient(lambda _: 5.0)
    run(client, tasks(20), Load(request_rate=10.0))
    assert client.most_open > 10


def test_arrivals_are_poisson_and_follow_the_seed() -> None:
    times = arrivals(4000, 2.0, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.05)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert times == arrivals(4000, 2.0, seed=1)
    assert times != arrivals(4000, 2.0, seed=2)


def test_refused_prompt_is_named_and_costs_the_others_nothing() -> None:
    client = FakeClient()
    client.refuse = {"t1"}
    outcome = run(client, tasks(3), Load(concurrency=2))
    result = measure(outcome)
    assert result.num_requests == 2
    assert result.errors == ["t1, turn 1: too long"]
    assert not result.partial


def test_backend_that_dies_leaves_what_was_answered() -> None:
    client = FakeClient()
    client.dies_at = 4
    outcome = run(client, tasks(3), Load(concurrency=1))
    assert isinstance(outcome.failure, BackendError)
    assert client.cancelled
    result = measure(outcome)
    assert result.partial
    assert result.num_requests == 1
    assert "the server is gone" in result.errors[-1]


def test_ctrl_c_ends_the_run_and_keeps_it() -> None:
    client = FakeClient()
    client.interrupted_at = 4
    outcome = run(client, tasks(3), Load(concurrency=1))
    assert isinstance(outcome.failure, KeyboardInterrupt)
    assert measure(outcome).errors == ["interrupted"]


@pytest.mark.parametrize("dies_at", [None, 1])
def test_objects_kept_from_the_collector_for_a_run_are_given_back(dies_at: int | None) -> None:
    client, frozen = FakeClient(), list[int]()
    client.step_seconds = lambda _: frozen.append(gc.get_freeze_count()) or 1.0  # type: ignore[func-returns-value]
    client.dies_at = dies_at
    run(client, tasks(2), Load(concurrency=1))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0

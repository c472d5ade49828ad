"""An engine of this process as a client, and what the harness itself costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from peagle.bench.run.backend_client import BackendClient
from peagle.bench.run.driver import Load, Outcome, drive
from peagle.bench.run.measure import measure
from peagle.bench.run.null_backend import NullBackend
from peagle.bench.workloads.prompter import Prompter
from peagle.bench.workloads.workload import Task
from peagle.engine.prompts import TokenizedPrompt
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams

LENGTHS = {"short": 2, "long": 40}  # answers in tokens


def run(backend: NullBackend, prompter: Any) -> Outcome:
    tasks = [Task("short", ("a", "b")), Task("long", ("a",))]

    def params_of(task: Task, turn: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=LENGTHS[task.id])

    return drive(BackendClient(backend, prompter), tasks, Load(concurrency=2), params_of)


def test_engine_goes_on_while_a_later_turn_is_written() -> None:
    backend, written = NullBackend(), threading.Event()
    own, steps = backend.step, 0

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps == 20:
            written.set()
        return own()

    class Slow(Prompter):
        def prompt(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
            if answers:
                assert written.wait(30), "the engine stands still"
            return super().prompt(task, answers)

    backend.step = step  # type: ignore[method-assign]
    outcome = run(backend, Slow(backend.get_tokenizer()))
    late = next(r for r in outcome.records if r.call.turn == 1)
    assert measure(outcome).num_output_tokens == 2 + 2 + 40
    assert late.call.prompt is not None
    assert late.times[0] > late.begun  # its time counts from the end of the answer before


def test_later_turn_that_does_not_fit_is_refused_and_costs_the_others_nothing() -> None:
    class Full(Prompter):
        def prompt(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
            if answers:
                raise RequestError("the context is full")
            return super().prompt(task, answers)

    backend = NullBackend()
    result = measure(run(backend, Full(backend.get_tokenizer())))
    assert result.num_requests == 2
    assert result.errors == ["short, turn 2: the context is full"]
    assert not result.partial


def test_first_turns_become_tokens_once() -> None:
    backend, read = NullBackend(), list[str]()
    prompter = Prompter(backend.get_tokenizer())
    own = prompter._read
    prompter._read = lambda task, answers: (  # type: ignore[method-assign]
        read.append(task.id) or own(task, answers)  # type: ignore[func-returns-value]
    )
    for name in ("a", "a~2", "b"):
        assert prompter.prompt(Task(name, ("hi",)), ()).token_ids
    assert read == ["a", "b"]


def test_prompts_that_others_opened_on_the_backend_are_not_reported() -> None:
    backend = NullBackend()
    backend.add_request(TokenizedPrompt(None, [1]), SamplingParams(max_tokens=3))
    outcome = run(backend, Prompter(backend.get_tokenizer()))
    assert sorted(len(record.counts) for record in outcome.records) == [2, 2, 40]


PROMISED = 20_000  # tokens per second


def tokens_per_cpu_second(streams: int) -> float:
    backend = NullBackend()
    client = BackendClient(backend, Prompter(backend.get_tokenizer()))
    params = SamplingParams(temperature=0.0, max_tokens=256)
    tasks = [Task(f"t{n}", ("a question",)) for n in range(max(64, streams))]
    begun = time.process_time()
    run = measure(drive(client, tasks, Load(concurrency=streams), lambda task, turn: params))
    assert run.num_output_tokens == 256 * len(tasks)
    return run.num_output_tokens / (time.process_time() - begun)


@pytest.mark.parametrize("streams", [1, 16, 128])
def test_harness_handles_the_promised_tokens_per_second(streams: int) -> None:
    # CPU time of this thread alone, best of three: the claim is about us, not the machine's load.
    # Rendering prompts and working out the figures count too.
    assert max(tokens_per_cpu_second(streams) for _ in range(3)) >= PROMISED

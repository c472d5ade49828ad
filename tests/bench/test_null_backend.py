"""What the harness itself costs."""

from __future__ import annotations

import time

import pytest

from peagle.bench.run.backend_client import BackendClient
from peagle.bench.run.driver import Load, drive
from peagle.bench.run.measure import measure
from peagle.bench.run.null_backend import NullBackend
from peagle.bench.workloads.prompter import Prompter
from peagle.bench.workloads.workload import Task
from peagle.sampling_params import SamplingParams

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

"""Keeps a client busy: a fixed number of streams, or arrivals at a rate.

Closed loop: C conversations at once; where one ends the next begins. Open loop: arrivals follow a
Poisson process that is drawn beforehand and does not wait for the backend. A latency counts from
the scheduled arrival, so a stall delays all that should have come meanwhile and shows in their
latencies (no coordinated omission). A later turn arrives when the answer before it has ended.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from peagle.bench.run.client import Call, Client, ClientAnswer, Record, Update
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError, RequestError
from peagle.sampling_params import SamplingParams

Clock = Callable[[], float]
ParamsOf = Callable[[Task, int], SamplingParams]  # of a task's turn


class Load(NamedTuple):
    """Exactly one of the two."""

    concurrency: int | None = None
    request_rate: float | None = None  # requests per second


class Outcome(NamedTuple):
    records: list[Record]
    failure: BaseException | None = None  # what cut the run short


def drive(
    client: Client,
    tasks: Sequence[Task],
    load: Load,
    params_of: ParamsOf,
    *,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Asks all tasks. Ctrl-C or a backend that dies ends it early; what was answered is kept."""
    driving = _Drive(client, tasks, load, params_of, seed, clock)
    gc.freeze()  # a collection that looks at all a model's libraries hold takes 0.1 s
    try:
        return driving.run()
    finally:
        gc.unfreeze()


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests come: gaps are exponential, with mean 1/rate."""
    generator, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        times.append(now)
    return times


class _Drive:
    def __init__(
        self,
        client: Client,
        tasks: Sequence[Task],
        load: Load,
        params_of: ParamsOf,
        seed: int,
        clock: Clock,
    ) -> None:
        self.client, self.params_of, self.clock = client, params_of, clock
        self.limit = load.concurrency
        times = [0.0] * len(tasks)
        if load.request_rate is not None:
            times = arrivals(len(tasks), load.request_rate, seed)
        # First turns are rendered before the clock runs; a later one needs the answer before it,
        # and its time counts.
        calls = [Call(task, 0, client.prompt(task, ()), params_of(task, 0)) for task in tasks]
        self.waiting = deque(zip(times, calls, strict=True))
        self.open: dict[Call, Record] = {}
        self.answers: dict[Task, tuple[str, ...]] = {}  # of the turns so far
        self.records: list[Record] = []

    def run(self) -> Outcome:
        begun = self.clock()
        try:
            while self.waiting or self.open:
                self._launch(begun)
                for update in self.client.wait(self._patience(begun)):
                    self._take(update)
        except (KeyboardInterrupt, BackendError) as error:
            self.client.cancel()
            return Outcome(self.records, error)
        return Outcome(self.records)

    def _launch(self, begun: float) -> None:
        while self.waiting:
            arrival, call = self.waiting[0]
            now = self.clock()
            if self.limit is not None:
                if len(self.open) >= self.limit:
                    return
            elif begun + arrival > now:
                return
            self.waiting.popleft()
            self._start(call, now if self.limit is not None else begun + arrival)

    def _patience(self, begun: float) -> float | None:
        """Seconds until the next arrival; None where only the backend can bring news."""
        if self.limit is not None or not self.waiting:
            return None
        return max(0.0, begun + self.waiting[0][0] - self.clock())

    def _start(self, call: Call, begun: float) -> None:
        record = Record(call, begun)
        try:
            self.client.start(call)
            self.open[call] = record
        except RequestError as error:
            record = _refused(call, begun, error)
        self.records.append(record)

    def _take(self, update: Update) -> None:
        call, now, num_tokens, answer = update
        record = self.open[call]
        if num_tokens > (record.counts[-1] if record.counts else 0):
            record.times.append(now)
            record.counts.append(num_tokens)
        if answer is not None:
            record.answer, record.refused = answer, answer.refused
            del self.open[call]
            self._follow_up(call, answer, now)

    def _follow_up(self, call: Call, answer: ClientAnswer, now: float) -> None:
        """The next turn of the same conversation takes the place of this one."""
        task, turn = call.task, call.turn + 1
        if turn >= task.num_turns or answer.error is not None:
            return
        self.answers[task] = (*self.answers.get(task, ()), answer.text)
        self._start(Call(task, turn, None, self.params_of(task, turn), self.answers[task]), now)


def _refused(call: Call, begun: float, error: RequestError) -> Record:
    return Record(call, begun, answer=ClientAnswer("", 0, error=error.message), refused=True)

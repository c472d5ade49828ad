"""A clock that a test moves, and a client whose backend is a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peagle.bench.run.client import Call, ClientAnswer, Record, Update
from peagle.bench.run.driver import Load, Outcome, drive
from peagle.bench.workloads.workload import Task
from peagle.errors import BackendError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


class FakeClient:
    """Each `wait` takes `step_seconds(n)` and gives every open call one token of NUM_TOKENS."""

    NUM_TOKENS = 3

    def __init__(self, step_seconds: Callable[[int], float] = lambda _: 1.0) -> None:
        self.now = 0.0
        self.step_seconds = step_seconds
        self.num_steps = 0
        self.open: dict[Call, int] = {}
        self.most_open = 0
        self.prompts: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.refuse: set[str] = set()
        self.dies_at: int | None = None
        self.interrupted_at: int | None = None
        self.cancelled = False

    def clock(self) -> float:
        return self.now

    def prompt(self, task: Task, answers: Sequence[str]) -> Any:
        return "|".join([*task.turns[:1], *answers])

    def start(self, call: Call) -> None:
        if call.task.id in self.refuse:
            raise RequestError("too long")
        if call.prompt is None:
            call.prompt = self.prompt(call.task, call.answers)
        self.prompts.append(call.prompt)
        self.started.append((call.task.id, call.turn))
        self.open[call] = 0
        self.most_open = max(self.most_open, len(self.open))

    def wait(self, timeout: float | None) -> list[Update]:
        if not self.open:
            assert timeout is not None, "nothing is open and nothing will come"
            self.now += timeout + 1e-9
            return []
        if self.num_steps == self.dies_at:
            raise BackendError("the server is gone")
        if self.num_steps == self.interrupted_at:
            raise KeyboardInterrupt
        self.now += self.step_seconds(self.num_steps)
        self.num_steps += 1
        return [self._grow(call) for call in list(self.open)]

    def cancel(self) -> None:
        self.cancelled = True

    def _grow(self, call: Call) -> Update:
        self.open[call] += 1
        count = self.open[call]
        if count < self.NUM_TOKENS:
            return Update(call, self.now, count)
        del self.open[call]
        text = f"answer {call.task.id}.{call.turn}"
        return Update(call, self.now, count, ClientAnswer(text, count, list(range(count))))


def run(client: FakeClient, tasks: Sequence[Task], load: Load, seed: int = 0) -> Outcome:
    return drive(client, tasks, load, lambda task, turn: PARAMS, seed=seed, clock=client.clock)


def record(
    times: Sequence[float],
    counts: Sequence[int],
    *,
    begun: float = 0.0,
    token_ids: Sequence[int] | None = None,
    accepted: Sequence[tuple[int, int]] = (),
    task: Task | None = None,
    turn: int = 0,
    prompt: Any = None,
    **changes: Any,
) -> Record:
    """An answered call; `accepted` are (drafts, kept) per step."""
    stats = SpecDecodeStats(num_output_tokens=counts[-1] if counts else 0)
    for drafts, kept in accepted:
        stats.observe(drafts, kept)
    ids = list(range(counts[-1])) if token_ids is None else list(token_ids)
    call = Call(task or Task("t", ("hello",)), turn, prompt, PARAMS)
    answer = ClientAnswer("", len(ids), ids, stats)
    return Record(call, begun, list(times), list(counts), **{"answer": answer, **changes})

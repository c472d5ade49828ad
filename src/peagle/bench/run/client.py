"""The contract between the driver and a client: a turn to be answered, and how its answer grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from peagle.bench.workloads.workload import Task
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats


@dataclass(eq=False)
class Call:
    """One turn of one task. `prompt` is in the form that the client itself made; None: the client
    makes it of `answers`, those of the turns before."""

    task: Task
    turn: int
    prompt: Any
    params: SamplingParams
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClientAnswer:
    text: str
    num_tokens: int
    token_ids: list[int] | None = None  # None: the backend shows none
    stats: SpecDecodeStats | None = None
    error: str | None = None
    refused: bool = False  # with an error: it never ran, the backend cannot serve it


class Update(NamedTuple):
    """`num_tokens` are there at `time`; `answer` comes with the last of them."""

    call: Call
    time: float
    num_tokens: int
    answer: ClientAnswer | None = None


@dataclass(eq=False)
class Record:
    """What became of a call. `begun` is its start, or its scheduled arrival."""

    call: Call
    begun: float
    times: list[float] = field(default_factory=list)  # of each chunk of tokens
    counts: list[int] = field(default_factory=list)  # tokens there at that time
    answer: ClientAnswer | None = None  # None: it was cut short
    refused: bool = False  # ClientAnswer.refused, or the client did not take it


class Client(Protocol):
    """Drives one backend. Times are those of time.perf_counter."""

    def prompt(self, task: Task, answers: Sequence[str]) -> Any:
        """The prompt of the turn that follows the answers given so far."""
        ...

    def start(self, call: Call) -> None:
        """Raises RequestError if it can never be served, or says so in an update later. Makes the
        call's prompt if it has none."""
        ...

    def wait(self, timeout: float | None) -> list[Update]:
        """Lets the backend work and says what came. May return nothing, at the latest after
        `timeout` seconds where nothing is open. Raises BackendError if the backend is gone."""
        ...

    def cancel(self) -> None:
        """Gives up all that is open."""
        ...

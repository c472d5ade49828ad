"""Where the target's answers come from: many questions in flight, answers as they finish."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from peagle.backends.vllm.backend import VllmBackend
from peagle.backends.vllm.requests import OpenRequest
from peagle.engine.engine import Engine
from peagle.engine.prompts import TokenizedPrompt
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams

_Open = TypeVar("_Open")  # a question's request, as the engine knows it


@dataclass(frozen=True, eq=False)
class Question:
    prompt_token_ids: list[int]
    seed: int


class TargetAnswer(NamedTuple):
    token_ids: list[int]  # what the target generated, its end-of-sequence token included
    clipped: bool = False  # it ran into the length limit
    error: str | None = None


class AnswerSource(Protocol):
    """Three implementations: the embedded engine, vLLM, and an endpoint."""

    capacity: int  # questions that may be in flight

    def submit(self, question: Question) -> None:
        """Raises RequestError if the question can never be answered."""
        ...

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        """Waits until at least one question in flight is answered."""
        ...

    def close(self) -> None: ...


class EngineAnswers(Generic[_Open]):
    """Questions in flight in an engine of this process, which is kept full: more wait than run,
    so a free place is taken at once."""

    def __init__(self, params: SamplingParams, max_num_seqs: int) -> None:
        self.params = params
        self.capacity = 2 * max_num_seqs
        self.asked: dict[_Open, Question] = {}

    def add(self, question: Question) -> _Open:
        raise NotImplementedError

    def step(self) -> Iterable[tuple[_Open, TargetAnswer]]:
        """Advances the engine; -> what finished."""
        raise NotImplementedError

    def submit(self, question: Question) -> None:
        self.asked[self.add(question)] = question

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        done: list[tuple[Question, TargetAnswer]] = []
        while self.asked and not done:
            done = [(self.asked.pop(opened), answer) for opened, answer in self.step()]
        return done


class EmbeddedAnswers(EngineAnswers[Request]):
    """Answers from the embedded engine."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        super().__init__(params, engine.scheduler.max_num_seqs)
        self.engine = engine
        self._numbers = itertools.count()

    def add(self, question: Question) -> Request:
        name = str(next(self._numbers))
        return self.engine.add_request(
            name, question.prompt_token_ids, self.params, seed=question.seed
        )

    def step(self) -> Iterator[tuple[Request, TargetAnswer]]:
        for request in {new.request: None for new in self.engine.step()}:
            if request.finish_reason is not None:
                clipped = request.finish_reason == "length"
                yield request, TargetAnswer(request.output_token_ids, clipped, request.error)

    def close(self) -> None:
        for request in self.asked:
            self.engine.abort_request(request)
        self.asked.clear()


class VllmAnswers(EngineAnswers[OpenRequest]):
    """Answers from vLLM in this process."""

    def __init__(self, backend: VllmBackend, params: SamplingParams) -> None:
        super().__init__(params, backend.max_num_seqs)
        self.backend = backend

    def add(self, question: Question) -> OpenRequest:
        prompt = TokenizedPrompt(None, question.prompt_token_ids)
        return self.backend.add_request(prompt, replace(self.params, seed=question.seed))

    def step(self) -> Iterator[tuple[OpenRequest, TargetAnswer]]:
        for request in self.backend.step():
            if request.finished:
                answer = request.output().outputs[0]
                clipped = answer.finish_reason == "length"
                yield request, TargetAnswer(answer.token_ids, clipped, answer.error)

    def close(self) -> None:
        self.asked.clear()
        self.backend.close()

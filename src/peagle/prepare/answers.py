"""Where the target's answers come from: many questions in flight, answers as they finish."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from peagle.backends.vllm.backend import VllmBackend
from peagle.backends.vllm.requests import OpenRequest
from peagle.engine.engine import Engine
from peagle.engine.prompts import TokenizedPrompt
from peagle.engine.request import Request
from peagle.sampling_params import SamplingParams


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


class EmbeddedAnswers:
    """The embedded engine, kept full: more wait than run, so a free place is taken at once."""

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self.engine, self.params = engine, params
        self.capacity = 2 * engine.scheduler.max_num_seqs
        self._asked: dict[Request, Question] = {}
        self._count = 0

    def submit(self, question: Question) -> None:
        request = self.engine.add_request(
            str(self._count), question.prompt_token_ids, self.params, seed=question.seed
        )
        self._asked[request] = question
        self._count += 1

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        done: list[tuple[Question, TargetAnswer]] = []
        while self._asked and not done:
            for request in {new.request: None for new in self.engine.step()}:
                if request.finish_reason is not None:
                    done.append((self._asked.pop(request), _answer(request)))
        return done

    def close(self) -> None:
        for request in self._asked:
            self.engine.abort_request(request)
        self._asked.clear()


class VllmAnswers:
    """vLLM in this process, kept as full as the embedded engine."""

    def __init__(self, backend: VllmBackend, params: SamplingParams) -> None:
        self.backend, self.params = backend, params
        self.capacity = 2 * backend.max_num_seqs
        self._asked: dict[OpenRequest, Question] = {}

    def submit(self, question: Question) -> None:
        prompt = TokenizedPrompt(None, question.prompt_token_ids)
        params = replace(self.params, seed=question.seed)
        self._asked[self.backend.add_request(prompt, params)] = question

    def collect(self) -> list[tuple[Question, TargetAnswer]]:
        done: list[tuple[Question, TargetAnswer]] = []
        while self._asked and not done:
            for request in self.backend.step():
                if request.finished:
                    answer = request.output().outputs[0]
                    clipped = answer.finish_reason == "length"
                    given = TargetAnswer(answer.token_ids, clipped, answer.error)
                    done.append((self._asked.pop(request), given))
        return done

    def close(self) -> None:
        self._asked.clear()
        self.backend.close()


def _answer(request: Request) -> TargetAnswer:
    clipped = request.finish_reason == "length"
    return TargetAnswer(request.output_token_ids, clipped, request.error)

"""Prompts in, answers and failures out: the work behind `peagle generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from peagle.cli import render
from peagle.cli.prompt_files import Failure, Message, Prompt
from peagle.errors import RequestError
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.backends.contract import Backend
    from peagle.outputs import CompletionOutput, Logprob, RequestOutput

LOWEST_LOGPROB = -9999.0  # for -inf, which JSON has no word for; vLLM writes the same


class Job(NamedTuple):
    """A prompt and the form in which the engine takes it."""

    prompt: Prompt
    request: str | dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What the engine gave back, in the order of the prompts."""

    prompts: list[Prompt]
    results: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for result in self.results for answer in result.outputs)

    @property
    def stats(self) -> SpecDecodeStats:
        total = SpecDecodeStats()
        for result in self.results:
            total.merge(result.stats)
        return total

    @property
    def failures(self) -> list[Failure]:
        return [
            Failure(prompt.where, answer.error or "the engine gave no reason")
            for prompt, result in zip(self.prompts, self.results, strict=True)
            for answer in result.outputs
            if answer.finish_reason == "error"
        ]


def prepare(
    llm: Backend,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    system: str | None,
    raw: bool,
) -> tuple[list[Job], list[Failure]]:
    """Sets aside what the engine would refuse, so that one bad prompt costs the others nothing."""
    jobs: list[Job] = []
    failures: list[Failure] = []
    for prompt in prompts:
        try:
            request = _request(llm, prompt, system=system, raw=raw)
            llm.check_request(request, params)
            jobs.append(Job(prompt, request))
        except RequestError as error:
            failures.append(Failure(prompt.where, error.message, error.hint))
    return jobs, failures


def answer_all(llm: Backend, jobs: Sequence[Job], params: SamplingParams) -> Run:
    start = time.perf_counter()
    results = llm.generate([job.request for job in jobs], params) if jobs else []
    return Run([job.prompt for job in jobs], results, time.perf_counter() - start)


def answer_streaming(llm: Backend, job: Job, params: SamplingParams) -> Run:
    """One prompt, its text to stdout as it comes."""
    start = time.perf_counter()
    written, result = 0, None
    for result in llm.stream(job.request, params):
        text = result.outputs[0].text
        render.write(text[written:])
        written = len(text)
    render.write("\n")
    return Run([job.prompt], [result] if result else [], time.perf_counter() - start)


def document(llm: Backend, run: Run, failures: Sequence[Failure]) -> dict[str, Any]:
    """The run as JSON."""
    return {
        "model": str(llm.model_path),
        "method": llm.method,
        "num_speculative_tokens": llm.num_speculative_tokens,
        "results": [
            {
                "where": prompt.where,
                "prompt": prompt.content,
                "num_prompt_tokens": len(result.prompt_token_ids),
                "outputs": [_answer_document(answer) for answer in result.outputs],
                "stats": result.stats.as_dict(),
            }
            for prompt, result in zip(run.prompts, run.results, strict=True)
        ],
        "errors": [failure._asdict() for failure in failures],
        "num_output_tokens": run.num_tokens,
        "seconds": run.seconds,
        "tokens_per_second": render.rate(run.num_tokens, run.seconds),
        "stats": run.stats.as_dict(),
    }


def _answer_document(answer: CompletionOutput) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        record["cumulative_logprob"] = answer.cumulative_logprob
        record["logprobs"] = [
            {token_id: _logprob(logprob) for token_id, logprob in position.items()}
            for position in answer.logprobs
        ]
    return record


def _logprob(entry: Logprob) -> dict[str, Any]:
    return entry._asdict() | {"logprob": max(entry.logprob, LOWEST_LOGPROB)}


def _request(
    llm: Backend, prompt: Prompt, *, system: str | None, raw: bool
) -> str | dict[str, Any]:
    if raw or not llm.get_tokenizer().chat_template:
        if system is None and isinstance(prompt.content, str):
            return prompt.content
        raise RequestError(
            "messages need a chat template", hint="drop --raw, or use a model that has one"
        )
    return llm.render_chat(with_system(prompt.messages, system))


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The conversation's own system message, if it has one, wins."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]

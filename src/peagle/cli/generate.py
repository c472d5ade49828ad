"""`peagle generate`: answers to prompts, in one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from peagle.cli import engines, render
from peagle.cli.flags import Json, Model, System, expand_flags
from peagle.cli.flags.drafter import DrafterFlags
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.sampling import SamplingFlags
from peagle.cli.flags.vllm import BackendFlags
from peagle.cli.prompt_files import Failure, NamedPrompt, given_prompts
from peagle.data.prompts import with_system
from peagle.errors import ConfigError, RequestError
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.backends.contract import Backend
    from peagle.outputs import CompletionOutput, Logprob, RequestOutput

MOST_REPORTED = 20  # prompts that failed, on stderr
LOWEST_LOGPROB = -9999.0  # for -inf, which JSON has no word for; vLLM writes the same


class Job(NamedTuple):
    """A prompt and the form in which the engine takes it."""

    prompt: NamedPrompt
    request: str | dict[str, Any]


@dataclass(frozen=True)
class BatchResult:
    """What the engine gave back, in the order of the prompts."""

    prompts: list[NamedPrompt]
    results: list[RequestOutput]
    seconds: float
    unfinished: list[NamedPrompt] = field(default_factory=list)
    interruption: KeyboardInterrupt | None = None  # what left them so

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
        failed = [
            Failure(prompt.where, answer.error or "the engine gave no reason")
            for prompt, result in zip(self.prompts, self.results, strict=True)
            for answer in result.outputs
            if answer.finish_reason == "error"
        ]
        return [*failed, *(Failure(prompt.where, "interrupted") for prompt in self.unfinished)]


@expand_flags
def generate(
    model: Model,
    sampling: SamplingFlags,
    drafter: DrafterFlags,
    engine: EngineFlags,
    backend: BackendFlags,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts, each in quotes.", metavar="PROMPT")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            help="A file with a prompt per line, text or JSON; - is stdin.", metavar="FILE"
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    system: System = None,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = SamplingParams.n,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Log-probabilities of the N best tokens, in --json.", metavar="N"),
    ] = SamplingParams.logprobs,
    as_json: Json = False,
) -> None:
    """Answer prompts, all in one batch. A prompt that cannot be answered is named: exit code 2."""
    # 1. Whatever can be wrong without the model is reported before it is loaded.
    _refuse_contradictions(raw, system, logprobs, as_json)
    params = sampling.params(n=n, logprobs=logprobs)
    engine_config, drafter_config = engine.config(backend.backend), drafter.config()
    vllm = backend.vllm_options(engine)
    good, failures = given_prompts(prompts or [], prompts_file)
    _report(failures)

    # 2. What the engine would refuse is set aside, the rest is answered.
    if good:
        llm = engines.build_backend(model, engine_config, drafter_config, vllm)
        streaming = len(good) == n == 1 and not as_json
        with closing(llm):
            jobs, refused = prepare_jobs(llm, good, params, system=system, raw=raw)
            _report(refused)
            if jobs and streaming:
                run = answer_streaming(llm, jobs[0], params)
            else:
                run = answer_all(llm, jobs, params)
        _report(run.failures)
        failures = [*failures, *refused, *run.failures]

        # 3. Data to stdout, the rest to stderr.
        if as_json:
            render.print_json(document(model, llm, run, failures))
        elif not streaming:
            _print_texts(run, headers=len(good) * n > 1)
        if run.results:
            render.note(render.stats_line(run.num_tokens, run.seconds, run.stats))
        if run.interruption is not None:
            raise run.interruption
    elif as_json:
        render.print_json(
            {"model": model, "results": [], "errors": [failure._asdict() for failure in failures]}
        )
    if failures:
        raise typer.Exit(2)


def _refuse_contradictions(
    raw: bool, system: str | None, logprobs: int | None, as_json: bool
) -> None:
    if raw and system is not None:
        raise ConfigError(
            "--system needs the chat template, which --raw turns off", hint="drop one of the two"
        )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs only appears in the JSON document", hint="add --json")


def _report(failures: list[Failure]) -> None:
    for failure in failures[:MOST_REPORTED]:
        render.print_error(f"{failure.where}: {failure.message}", failure.hint)
    if len(failures) > MOST_REPORTED:
        render.note(f"and {len(failures) - MOST_REPORTED} more; --json has them all")


def _print_texts(run: BatchResult, *, headers: bool) -> None:
    """The answers; headers as `head` and `tail` print them where there are several."""
    for prompt, result in zip(run.prompts, run.results, strict=True):
        for answer in result.outputs:
            if answer.finish_reason == "error":
                continue
            if headers:
                number = f", answer {answer.index + 1}" if len(result.outputs) > 1 else ""
                render.write(f"==> {prompt.where}{number} <==\n")
            render.write(f"{answer.text}\n")


def prepare_jobs(
    llm: Backend,
    prompts: Sequence[NamedPrompt],
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


def answer_all(llm: Backend, jobs: Sequence[Job], params: SamplingParams) -> BatchResult:
    """Ctrl-C keeps what is finished."""
    start = time.perf_counter()
    finished: dict[int, RequestOutput] = {}
    interruption = None
    try:
        for index, result in llm.as_finished([job.request for job in jobs], params):
            finished[index] = result
    except KeyboardInterrupt as error:
        interruption = error
    done = sorted(finished)
    return BatchResult(
        [jobs[index].prompt for index in done],
        [finished[index] for index in done],
        time.perf_counter() - start,
        [job.prompt for index, job in enumerate(jobs) if index not in finished],
        interruption,
    )


def answer_streaming(llm: Backend, job: Job, params: SamplingParams) -> BatchResult:
    """One prompt, its text to stdout as it comes."""
    start = time.perf_counter()
    written, result = 0, None
    for result in llm.stream(job.request, params):
        text = result.outputs[0].text
        render.write(text[written:])
        written = len(text)
    render.write("\n")
    return BatchResult([job.prompt], [result] if result else [], time.perf_counter() - start)


def document(
    model: str, llm: Backend, run: BatchResult, failures: Sequence[Failure]
) -> dict[str, Any]:
    """The run as JSON."""
    return {
        "model": model,
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
    llm: Backend, prompt: NamedPrompt, *, system: str | None, raw: bool
) -> str | dict[str, Any]:
    if raw or not llm.get_tokenizer().chat_template:
        if system is None and isinstance(prompt.content, str):
            return prompt.content
        raise RequestError(
            "messages need a chat template", hint="drop --raw, or use a model that has one"
        )
    return llm.render_chat(with_system(prompt.messages, system))

"""`peagle generate`: answers to prompts, in one batch."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from peagle.cli import answering, options, render
from peagle.cli.answering import Run
from peagle.cli.backend_flags import BackendFlags
from peagle.cli.flags import expand_flags
from peagle.cli.options import DrafterFlags, EngineFlags, Json, Model, SamplingFlags, System
from peagle.cli.prompt_files import Failure, read_prompts
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams


@expand_flags
def generate(
    model: Model,
    sampling: SamplingFlags,
    drafter: DrafterFlags,
    engine: EngineFlags,
    backend: BackendFlags,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One prompt each, in quotes.", metavar="PROMPT")
    ] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(help="One prompt per line, text or jsonl; - is stdin.", metavar="FILE"),
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
    # 1. Whatever can be wrong without the model is said before it is loaded.
    _refuse_contradictions(raw, system, logprobs, as_json)
    params = sampling.params(n=n, logprobs=logprobs)
    engine_config, drafter_config = engine.config(backend.backend), drafter.config()
    vllm = backend.vllm_options(engine)
    good, failures = read_prompts(prompts or [], prompts_file)
    _report(failures)

    # 2. What the engine would refuse is set aside, the rest is answered.
    if good:
        llm = options.build_backend(model, engine_config, drafter_config, vllm)
        streaming = len(good) == n == 1 and not as_json and sys.stdout.isatty()
        with closing(llm):
            jobs, refused = answering.prepare(llm, good, params, system=system, raw=raw)
            _report(refused)
            if jobs and streaming:
                run = answering.answer_streaming(llm, jobs[0], params)
            else:
                run = answering.answer_all(llm, jobs, params)
        _report(run.failures)
        failures = [*failures, *refused, *run.failures]

        # 3. Data to stdout, the rest to stderr.
        if as_json:
            render.print_json(answering.document(llm, run, failures))
        elif not streaming:
            _print_texts(run, headers=len(good) * n > 1)
        if run.results:
            render.note(render.stats_line(run.num_tokens, run.seconds, run.stats))
    if failures:
        raise typer.Exit(2)


def _refuse_contradictions(
    raw: bool, system: str | None, logprobs: int | None, as_json: bool
) -> None:
    if raw and system is not None:
        raise ConfigError(
            "--system needs the chat template, --raw turns it off", hint="drop one of the two"
        )
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs shows in the JSON document alone", hint="add --json")


def _report(failures: list[Failure]) -> None:
    for failure in failures:
        render.print_error(f"{failure.where}: {failure.message}", failure.hint)


def _print_texts(run: Run, *, headers: bool) -> None:
    """The answers; headers as `head` and `tail` print them where there are several."""
    for prompt, result in zip(run.prompts, run.results, strict=True):
        for answer in result.outputs:
            if answer.finish_reason == "error":
                continue
            if headers:
                number = f", answer {answer.index + 1}" if len(result.outputs) > 1 else ""
                render.write(f"==> {prompt.where}{number} <==\n")
            render.write(f"{answer.text}\n")

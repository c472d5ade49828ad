"""`peagle prepare`: the target's own answers to prompts, as token ids with a loss mask."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli import engines, render
from peagle.cli.flags import Json, expand_flags
from peagle.cli.flags.answers import AnswerFlags, Limit, Split
from peagle.cli.flags.drafter import DrafterFlags
from peagle.cli.flags.engine import EngineFlags
from peagle.cli.flags.vllm import BackendFlags
from peagle.errors import ConfigError, DataError
from peagle.files import held_folder

if TYPE_CHECKING:
    from peagle.backends.vllm.options import VllmOptions
    from peagle.prepare.answers import AnswerSource
    from peagle.prepare.dataset_spec import DatasetSpec
    from peagle.prepare.preparation import PreparationProgress

MAX_TOKENS = 1024
CUT_LOOPS = 64
CONCURRENCY = 64


@expand_flags
def prepare(
    answers: AnswerFlags,
    drafter: DrafterFlags,
    engine: EngineFlags,
    backend: BackendFlags,
    model: Annotated[
        str, typer.Option(help="The target: a folder, a Hugging Face id or smollm2-135m.")
    ],
    prompts: Annotated[
        str,
        typer.Option(help="A .jsonl or .jsonl.gz file, a folder of them, or a dataset id."),
    ],
    out: Annotated[Path, typer.Option(help="The dataset's folder; a second run goes on in it.")],
    split: Split = "train",
    limit: Limit = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = MAX_TOKENS,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Skip longer prompts; default: all that fit the context.", min=1),
    ] = None,
    cut_loops: Annotated[
        int, typer.Option(help="Tokens kept after a loop begins; -1: all of it.", min=-1)
    ] = CUT_LOOPS,
    endpoint: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server (vLLM) answers.", metavar="URL"),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="The model's name there; default: --model.", metavar="NAME")
    ] = None,
    endpoint_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with its API key.", metavar="VAR")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="With --endpoint: requests at once.", min=1)
    ] = CONCURRENCY,
    as_json: Json = False,
) -> None:
    """Make a training dataset: prompts, answered by the target itself."""
    from peagle.checkpoints.references import load_tokenizer, resolve_model
    from peagle.data.dataset import Dataset, DatasetWriter
    from peagle.data.prompts import read_prompts
    from peagle.data.summary import summarise
    from peagle.prepare.preparation import ALL_ROWS, Preparation

    # 1. Whatever can be wrong without the model is reported before it is loaded.
    spec = answers.spec(
        model,
        max_tokens,
        cut_loops=cut_loops if cut_loops >= 0 else None,
        answers_from=_answers_from(backend, endpoint, endpoint_model or model),
    )
    vllm = backend.vllm_options(engine)
    found = read_prompts(prompts, split=split, limit=limit)
    tokenizer = load_tokenizer(resolve_model(model))
    asking = spec.dialogue_options(tokenizer)
    key = _key(endpoint_key_env)
    with held_folder(out):
        writer = DatasetWriter(out, spec.record(tokenizer), rows_per_shard=ALL_ROWS)

        # 2. Answers, from here or from there.
        if endpoint is not None:
            source = _endpoint(endpoint, endpoint_model or model, key, spec, concurrency)
        elif vllm is not None:
            source = _vllm(model, engine, drafter, spec, vllm)
        else:
            source = _embedded(model, engine, drafter, spec)
        run = Preparation(writer, source, asking, max_prompt_tokens, report=ProgressLine())
        try:
            counts = run(found.good, found.bad)
        except KeyboardInterrupt:
            render.note(
                f"interrupted: {out} keeps {writer.num_rows} rows; "
                "give the same command again to go on"
            )
            raise

    # 3. What there is now, earlier runs included.
    if counts.failed:
        render.note(f"{counts.failed} prompts failed: see {run.errors}")
    if not counts.answered and not counts.already_done:
        raise DataError("no prompt was answered", hint=f"{run.errors} says why")
    document = {
        **summarise(Dataset(out)),
        "failed": counts.failed,
        "skipped_too_long": counts.too_long,
        "skipped_repeated": found.num_repeated,
        "already_done": counts.already_done,
        "path": str(out),
    }
    if as_json:
        render.print_json(document)
    else:
        _print_summary(document)


class ProgressLine:
    """One line on stderr: rewritten on a terminal, now and then elsewhere."""

    def __init__(self) -> None:
        self.on_terminal = sys.stderr.isatty()
        self.every = 1.0 if self.on_terminal else 30.0
        self.last = time.monotonic()

    def __call__(self, progress: PreparationProgress) -> None:
        now = time.monotonic()
        finished = progress.done == progress.total
        if now - self.last < self.every and not finished:
            return
        self.last = now
        left = progress.seconds_left
        line = (
            f"{progress.done} of {progress.total} prompts, {progress.num_tokens} tokens, "
            f"{progress.tokens_per_second:.0f} tokens/s, "
            f"{'?' if left is None else f'{left / 60:.1f}'} min left"
        )
        if self.on_terminal:
            sys.stderr.write(f"\r\033[K{line}" + ("\n" if finished else ""))
            sys.stderr.flush()
        else:
            render.note(line)


def _embedded(
    model: str, engine: EngineFlags, drafter: DrafterFlags, spec: DatasetSpec
) -> AnswerSource:
    from peagle.prepare.answers import EmbeddedAnswers

    llm = engines.build_llm(model, engine.config(), drafter.config())
    return EmbeddedAnswers(llm.engine, spec.params)


def _vllm(
    model: str, engine: EngineFlags, drafter: DrafterFlags, spec: DatasetSpec, options: VllmOptions
) -> AnswerSource:
    from peagle.backends.vllm.backend import VllmBackend
    from peagle.prepare.answers import VllmAnswers

    backend = VllmBackend(model, engine.config("vllm"), drafter.config(), options)
    return VllmAnswers(backend, spec.params)


def _answers_from(backend: BackendFlags, endpoint: str | None, name: str) -> str:
    if endpoint is None:
        return "" if backend.backend == "embedded" else backend.backend
    if backend.backend != "embedded":
        raise ConfigError(
            f"--endpoint and --backend {backend.backend} were both given", hint="use one of the two"
        )
    return f"endpoint {name}"


def _endpoint(
    url: str, model: str, key: str | None, spec: DatasetSpec, concurrency: int
) -> AnswerSource:
    from peagle.http import Endpoint
    from peagle.prepare.endpoint import EndpointAnswers

    return EndpointAnswers(Endpoint(url, model, key, through_proxy=True), spec.params, concurrency)


def _key(variable: str | None) -> str | None:
    if variable is not None and variable not in os.environ:
        raise ConfigError(f"--endpoint-key-env: {variable} is not set")
    return os.environ[variable] if variable is not None else None


def _print_summary(document: dict[str, Any]) -> None:
    for name, value in document.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        render.write(f"{name.replace('_', ' '):18} {shown}\n")

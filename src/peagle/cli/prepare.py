"""`peagle prepare`: the target's own answers to prompts, as token ids with a loss mask."""

from __future__ import annotations

import os
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
from peagle.files import check_folder, held_folder

if TYPE_CHECKING:
    from peagle.backends.vllm.options import VllmOptions
    from peagle.prepare.answers import AnswerSource
    from peagle.prepare.dataset_spec import DatasetSpec

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
    out: Annotated[Path, typer.Option(help="The dataset's folder; a second run continues it.")],
    split: Split = "train",
    limit: Limit = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer, in tokens.")
    ] = MAX_TOKENS,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Skip longer prompts; default: those that exceed the context.", min=1),
    ] = None,
    cut_loops: Annotated[
        int, typer.Option(help="Tokens to keep once an answer loops; -1: all of them.", min=-1)
    ] = CUT_LOOPS,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Let an OpenAI-compatible server, e.g. vLLM, answer.", metavar="URL"),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(help="The model's name on the server; default: --model.", metavar="NAME"),
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
    from peagle.engine.loading import choose_device
    from peagle.http import Endpoint, check_reachable
    from peagle.prepare.endpoint import EndpointAnswers
    from peagle.prepare.preparation import ALL_ROWS, Preparation

    # 1. Whatever can be wrong without the model is reported before it is loaded.
    spec = answers.spec(
        model,
        max_tokens,
        cut_loops=cut_loops if cut_loops >= 0 else None,
        answers_from=_answers_from(backend, endpoint, endpoint_model or model),
    )
    vllm = backend.vllm_options(engine)
    check_folder(out)
    key, there = _key(endpoint_key_env), None
    if endpoint is not None:
        there = Endpoint(endpoint, endpoint_model or model, key, through_proxy=True)
        check_reachable(there)
    elif vllm is None:
        choose_device(engine.config())
    found = read_prompts(prompts, split=split, limit=limit)
    tokenizer = load_tokenizer(resolve_model(model))
    asking = spec.dialogue_options(tokenizer)
    with held_folder(out):
        writer = DatasetWriter(out, spec.record(tokenizer), rows_per_shard=ALL_ROWS)

        # 2. Answers, from here or from there.
        if there is not None:
            source: AnswerSource = EndpointAnswers(there, spec.params, concurrency)
        elif vllm is not None:
            source = _vllm(model, engine, drafter, spec, vllm)
        else:
            source = _embedded(model, engine, drafter, spec)
        run = Preparation(writer, source, asking, max_prompt_tokens)
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


def _key(variable: str | None) -> str | None:
    if variable is not None and variable not in os.environ:
        raise ConfigError(
            f"--endpoint-key-env: {variable} is not set", hint=f"export {variable}=KEY"
        )
    return os.environ[variable] if variable is not None else None


def _print_summary(document: dict[str, Any]) -> None:
    for name, value in document.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        render.write(f"{name.replace('_', ' '):18} {shown}\n")

"""`peagle demo`: the same prompts with each method; the same tokens, or exit code 1."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from peagle.cli import comparison, options, render
from peagle.cli.comparison import Contender, find_differences
from peagle.cli.demo_prompts import PROMPTS
from peagle.cli.options import Json
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams

MODEL = "smollm2-135m"
NUM_PROMPTS = 6
MAX_TOKENS = 128


def demo(
    model: Annotated[str, typer.Option(help="The target.")] = MODEL,
    prompts: Annotated[int, typer.Option(help=f"How many, 1 to {len(PROMPTS)}.")] = NUM_PROMPTS,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = MAX_TOKENS,
    as_json: Json = False,
) -> None:
    """Compare plain decoding with each drafter: speed, acceptance, and the same tokens."""
    if not 1 <= prompts <= len(PROMPTS):
        raise ConfigError(f"--prompts {prompts} is out of range", hint=f"use 1 to {len(PROMPTS)}")
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    contenders = _contenders(model)
    _run(contenders, PROMPTS[:prompts], params)
    document = _document(model, contenders, params)
    title = f"{model}: {prompts} prompts, greedy, up to {max_tokens} tokens, one at a time"
    rows = [comparison.table_row(figures) for figures in document["methods"]]
    file = sys.stderr if as_json else sys.stdout
    render.print_table(title, comparison.COLUMNS, rows, file=file)
    if as_json:
        render.print_json(document)
    _exit_if_different(contenders)


def _contenders(model: str) -> list[Contender]:
    """Plain first, then n-gram, then every shipped head for this target."""
    drafters: dict[str, SpeculativeConfig | None] = {
        "plain": None,
        "ngram": SpeculativeConfig(method="ngram"),
    }
    for head in options.shipped_heads():
        if head.target == model:
            drafters[head.name.removeprefix(f"{model}-")] = SpeculativeConfig(model=head.name)
    return [_contender(model, name, drafter) for name, drafter in drafters.items()]


def _contender(model: str, name: str, drafter: SpeculativeConfig | None) -> Contender:
    # float32: the claim is equality token for token, and bfloat16 has ties that rounding breaks.
    render.note(f"loading {model}, {name}")
    llm = options.build_llm(model, EngineConfig(dtype="float32", max_num_seqs=1), drafter)
    llm.chat(_messages("Hello"), SamplingParams(temperature=0.0, max_tokens=8))  # warm-up
    return Contender(name, llm, llm.num_speculative_tokens if drafter else None)


def _run(contenders: Sequence[Contender], prompts: Sequence[str], params: SamplingParams) -> None:
    """Every method on a prompt before the next prompt, and another first each time: what else
    the machine does then falls on all alike."""
    for number, prompt in enumerate(prompts):
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            start = time.perf_counter()
            result = contender.llm.chat(_messages(prompt), params)[0]
            contender.seconds.append(time.perf_counter() - start)
            contender.answers.append(list(result.outputs[0].token_ids))
            contender.stats.append(result.stats)
        speeds = ", ".join(
            f"{c.name} {render.rate(len(c.answers[-1]), c.seconds[-1]):.1f}" for c in contenders
        )
        render.note(f"prompt {number + 1} of {len(prompts)}: tokens/s {speeds}")


def _document(
    model: str, contenders: Sequence[Contender], params: SamplingParams
) -> dict[str, Any]:
    from peagle.provenance import provenance

    plain = contenders[0]
    differences = [d._asdict() for c in contenders[1:] for d in find_differences(plain, c)]
    return {
        "model": model,
        "num_prompts": len(plain.answers),
        "max_tokens": params.max_tokens,
        "methods": [comparison.record(plain, contender) for contender in contenders],
        "identical": not differences,
        "differences": differences,
        "provenance": provenance(probe_torch=True),
    }


def _exit_if_different(contenders: Sequence[Contender]) -> None:
    plain = contenders[0]
    differences = [d for c in contenders[1:] for d in find_differences(plain, c)]
    for difference in differences:
        render.print_error(f"the output differs: {difference}")
    if differences:
        raise typer.Exit(1)
    render.note("every method gave the plain target's tokens, all of them")


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]

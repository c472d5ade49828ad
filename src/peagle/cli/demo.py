"""`peagle demo`: the same prompts with each method; the same tokens, or exit code 1."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from peagle.bench.results import figures
from peagle.bench.results.document import is_busy
from peagle.bench.results.intervals import Interval, median_interval
from peagle.cli import engines, render
from peagle.cli.flags import Json
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError
from peagle.sampling_params import SamplingParams
from peagle.speculation.looping import is_looping
from peagle.speculation.statistics import SpecDecodeStats

if TYPE_CHECKING:
    from peagle.engine.llm import LLM

MODEL = "smollm2-135m"
NUM_PROMPTS, MAX_TOKENS, REPEATS = 4, 48, 3  # a minute on two cores
COLUMNS = (
    *("method", "K", "tokens/s", "speed-up", "acceptance length"),
    *("steps that drafted", "same output"),
)
# Written for the demo: chat, code, maths, summarising, rewriting, extraction.
PROMPTS = (
    "I have a free Saturday in a city I do not know. How should I plan the day?",
    "Write a Python function that returns the n-th Fibonacci number, and one that lists the "
    "first n of them. Add a docstring to each.",
    "A bakery sells rolls at 3 for 2 euros. Anna buys 12 rolls and pays with a 20 euro note. "
    "How much change does she get? Explain step by step.",
    "Summarise this in two sentences: The old lighthouse on the cape was built in 1871 to guide "
    "fishing boats past the reef. For ninety years a keeper lived there and lit the lamp by hand "
    "every evening. In 1961 the lamp was replaced by an electric one, the last keeper moved to the "
    "village, and the house stood empty until a group of volunteers turned it into a small museum "
    "of the sea.",
    "Rewrite this letter so that it is polite: You sent me the wrong shoes. I ordered the blue "
    "ones in size 42 and got red ones in size 40. Send me the right ones at once and take these "
    "back.",
    "List every name and every date in this text as a table with two columns: Maria opened the "
    "shop on 3 May 2004. Her brother Luis joined her on 17 June 2006, and their cousin Elena took "
    "over the accounts on 1 January 2011.",
    "Explain to a ten-year-old why the sky is blue and why it is red in the evening.",
    "Write a JavaScript function that takes a list of words and returns an object that counts how "
    "often each word occurs.",
)


@dataclass
class Repeat:
    """All prompts once: one entry for each."""

    answers: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: list[SpecDecodeStats] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return render.rate(sum(map(len, self.answers)), sum(self.seconds))


@dataclass
class Contender:
    """One method, its engine and what it has done so far."""

    name: str
    llm: LLM
    num_speculative_tokens: int | None
    is_auto: bool = False  # that is the most, and each step verifies as many as pay
    repeats: list[Repeat] = field(default_factory=list)

    @property
    def answers(self) -> list[list[int]]:
        """All of them, a repeat's prompts in turn."""
        return [answer for repeat in self.repeats for answer in repeat.answers]

    @property
    def speeds(self) -> dict[int, float]:
        """Tokens per second of each repeat."""
        return {n: repeat.tokens_per_second for n, repeat in enumerate(self.repeats)}

    def total(self, *, with_looping: bool = True) -> SpecDecodeStats:
        """Greedy answers are the same in every repeat, so those of one say all."""
        total, first = SpecDecodeStats(), self.repeats[0]
        for stats, answer in zip(first.stats, first.answers, strict=True):
            if with_looping or not is_looping(answer):
                total.merge(stats)
        return total


class Difference(NamedTuple):
    """Where a method first left the plain target's answer; None: the answer had ended."""

    method: str
    prompt: int  # counted from 1, as is the token
    token: int
    expected: int | None
    got: int | None

    def __str__(self) -> str:
        return (
            f"{self.method}: prompt {self.prompt}, token {self.token}: "
            f"plain has {_named(self.expected)}, {self.method} has {_named(self.got)}"
        )


def demo(
    model: Annotated[str, typer.Option(help="The target.")] = MODEL,
    prompts: Annotated[
        int, typer.Option(help=f"Number of prompts, 1 to {len(PROMPTS)}.")
    ] = NUM_PROMPTS,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum length of an answer, in tokens.")
    ] = MAX_TOKENS,
    repeats: Annotated[
        int, typer.Option(help="Runs of each method; three or more give intervals.")
    ] = REPEATS,
    as_json: Json = False,
) -> None:
    """Compare plain decoding with each drafter: speed, acceptance, and the same tokens."""
    if not 1 <= prompts <= len(PROMPTS):
        raise ConfigError(f"--prompts {prompts} is out of range", hint=f"use 1 to {len(PROMPTS)}")
    from peagle.bench.run.meters import CpuMeter
    from peagle.bench.run.plan import MOST_REPEATS

    if not 1 <= repeats <= MOST_REPEATS:
        raise ConfigError(f"--repeats {repeats} is out of range", hint=f"use 1 to {MOST_REPEATS}")

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    contenders = _contenders(model)
    with CpuMeter() as cpu:
        _run(contenders, PROMPTS[:prompts], params, repeats)
    document = _document(model, contenders, params, cpu.others)
    title = (
        f"{model}: {figures.counted(prompts, 'prompt')}, greedy, up to {max_tokens} tokens, "
        f"one at a time; median of {figures.counted(repeats, 'repeat')}"
    )
    gained = _gains(contenders)
    rows = [table_row(c, gained[c.name], contenders[0]) for c in contenders]
    file = sys.stderr if as_json else sys.stdout
    render.print_table(title, COLUMNS, rows, file=file)
    if is_busy(cpu.others):
        render.note(busy_note(cpu.others))
    if as_json:
        render.print_json(document)
    _exit_if_different(contenders)


def busy_note(others: float | None) -> str:
    return f"busy: others took {figures.share(others)} of the CPU time, so speeds are too low"


def _contenders(model: str) -> list[Contender]:
    """Plain first, then n-gram, then every shipped head for this target."""
    drafters: dict[str, SpeculativeConfig | None] = {
        "plain": None,
        "ngram": SpeculativeConfig(method="ngram"),
    }
    for head in engines.shipped_heads():
        if head.target == model:
            drafters[head.name.removeprefix(f"{model}-")] = SpeculativeConfig(model=head.name)
    return [_contender(model, name, drafter) for name, drafter in drafters.items()]


def _contender(model: str, name: str, drafter: SpeculativeConfig | None) -> Contender:
    # float32: the claim is equality token for token, and bfloat16 has ties that rounding breaks.
    render.note(f"loading {model}, {name}")
    # Without a prefix cache: a repeat has the same prompts, and each must read them anew.
    config = EngineConfig(dtype="float32", max_num_seqs=1, enable_prefix_caching=False)
    llm = engines.build_llm(model, config, drafter)
    llm.chat(_messages("Hello"), SamplingParams(temperature=0.0, max_tokens=8))  # warm-up
    return Contender(name, llm, llm.num_speculative_tokens if drafter else None, llm.is_auto)


def _run(
    contenders: Sequence[Contender], prompts: Sequence[str], params: SamplingParams, repeats: int
) -> None:
    """Every method on a prompt before the next prompt, and another first each time: what else
    the machine does then falls on all alike."""
    for repeat in range(repeats):
        for contender in contenders:
            contender.repeats.append(Repeat())
        for number, prompt in enumerate(prompts):
            turn = (repeat + number) % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                _ask(contender, prompt, params)
        speeds = ", ".join(f"{c.name} {figures.quantity(c.speeds[repeat])}" for c in contenders)
        render.note(f"repeat {repeat + 1} of {repeats}: tokens/s {speeds}")


def _ask(contender: Contender, prompt: str, params: SamplingParams) -> None:
    start = time.perf_counter()
    result = contender.llm.chat(_messages(prompt), params)[0]
    repeat = contender.repeats[-1]
    repeat.seconds.append(time.perf_counter() - start)
    repeat.answers.append(list(result.outputs[0].token_ids))
    repeat.stats.append(result.stats)


def _gains(contenders: Sequence[Contender]) -> dict[str, Interval]:
    """Speed over that of plain decoding, by name."""
    from peagle.bench.analysis.gains import scatter_of

    scatter = scatter_of(c.speeds for c in contenders)
    return {c.name: scatter.ratio(c.speeds, contenders[0].speeds) for c in contenders}


def _document(
    model: str, contenders: Sequence[Contender], params: SamplingParams, others: float | None
) -> dict[str, Any]:
    from peagle.provenance import provenance

    plain, gained = contenders[0], _gains(contenders)
    differences = [d._asdict() for c in contenders[1:] for d in find_differences(plain, c)]
    return {
        "model": model,
        "num_prompts": len(plain.repeats[0].answers),
        "max_tokens": params.max_tokens,
        "num_repeats": len(plain.repeats),
        "other_cpu_share": others,
        "methods": [record(plain, c, gained[c.name]) for c in contenders],
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
    render.note("every method gave exactly the plain target's tokens")


def _messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def find_differences(plain: Contender, other: Contender) -> list[Difference]:
    """The first difference of each answer; empty if all tokens are the same."""
    from peagle.bench.run.lossless import first_difference, token_at

    found, num_prompts = [], len(plain.repeats[0].answers)
    for number, (ours, theirs) in enumerate(zip(plain.answers, other.answers, strict=True)):
        at = first_difference(ours, theirs)
        if at is not None:
            wanted, got = token_at(ours, at), token_at(theirs, at)
            found.append(Difference(other.name, number % num_prompts + 1, at + 1, wanted, got))
    return list(dict.fromkeys(found))  # every repeat differs at the same place


def record(plain: Contender, other: Contender, gain: Interval) -> dict[str, Any]:
    """One method's figures, ready for JSON."""
    total, steady = other.total(), other.total(with_looping=False)
    first = other.repeats[0].answers
    return {
        "method": other.name,
        "num_speculative_tokens": other.num_speculative_tokens,
        "is_auto": other.is_auto,
        "num_output_tokens": sum(map(len, first)),  # of a repeat
        "tokens_per_second": median(other.speeds.values()),
        "tokens_per_second_of_repeats": list(other.speeds.values()),
        "speedup": gain.value,
        "speedup_interval": None if gain.low is None else [gain.low, gain.high],
        "mean_acceptance_length": total.mean_acceptance_length if total.num_drafts else None,
        "mean_acceptance_length_without_looping": (
            steady.mean_acceptance_length if steady.num_drafts else None
        ),
        "looping_answers": sum(map(is_looping, first)),
        "share_of_steps_that_drafted": render.rate(total.num_drafts, total.num_steps),
        "same_output": not find_differences(plain, other),
        "stats": total.as_dict(),
    }


def table_row(other: Contender, gain: Interval, plain: Contender) -> list[str]:
    """The columns of COLUMNS."""
    k, total = other.num_speculative_tokens, other.total()
    return [
        other.name,
        _drafts_per_step(other),
        figures.with_spread(median_interval([*other.speeds.values()])),
        figures.factor_with_bounds(gain) if k else figures.NOTHING,
        figures.length(total.mean_acceptance_length if total.num_drafts else None),
        figures.share(render.rate(total.num_drafts, total.num_steps) if k else None),
        "NO" if find_differences(plain, other) else "yes",
    ]


def _drafts_per_step(other: Contender) -> str:
    if other.is_auto:
        return f"auto ({other.total().mean_draft_tokens:.1f})"
    return str(other.num_speculative_tokens or figures.NOTHING)


def _named(token_id: int | None) -> str:
    return "the end" if token_id is None else f"id {token_id}"

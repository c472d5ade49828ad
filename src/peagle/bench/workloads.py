"""What a backend is asked: named sets of prompts, files of them, random tokens. Imports no torch.

A row that cannot be read is skipped and counted, with its line named; a source without a single
good row is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from peagle.bench.named_workloads import NAMED, read_named
from peagle.bench.offline_prompts import PROMPTS
from peagle.bench.results import WorkloadInfo
from peagle.data.prompts import BadPrompt, Conversation, Prompts, read_prompts
from peagle.errors import ConfigError, DataError

OFFLINE = "offline"
SYNTHETIC = re.compile(r"synthetic:(\d+),(\d+)")
ROUNDS = "~"  # `id~2`: the second time that a prompt is asked in one run


@dataclass(frozen=True)
class Task:
    """One conversation, or `num_random_tokens` random tokens as a prompt."""

    id: str
    turns: tuple[str, ...] = ()
    system: str | None = None
    category: str = ""
    num_random_tokens: int = 0

    @property
    def num_turns(self) -> int:
        return len(self.turns) or 1

    @property
    def is_repeat(self) -> bool:
        return ROUNDS in self.id

    @property
    def source_id(self) -> str:
        """The same for every time that it is asked."""
        return self.id.partition(ROUNDS)[0]


Categorized = TypeVar("Categorized", Conversation, Task)


@dataclass(frozen=True)
class Workload:
    name: str
    tasks: tuple[Task, ...]
    bad: tuple[BadPrompt, ...] = ()
    raw: bool = False
    max_tokens: int | None = None  # of its answers, where the workload fixes it
    ignore_eos: bool = False

    @property
    def sha256(self) -> str:
        """Over what is asked, in its order; names and categories do not change the work."""
        asked = [[t.system, *t.turns, t.num_random_tokens] for t in self.tasks]
        content = json.dumps([asked, self.raw, self.max_tokens, self.ignore_eos])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def info(self) -> WorkloadInfo:
        categories = Counter(task.category for task in self.tasks if task.category)
        return WorkloadInfo(
            self.name, self.sha256, len(self.tasks), dict(categories), len(self.bad), self.raw
        )

    def without(self, refused: Sequence[BadPrompt]) -> Workload:
        """Without the tasks that a model cannot take; `where` of each is the task's id."""
        names = {bad.where for bad in refused}
        kept = tuple(task for task in self.tasks if task.id not in names)
        return replace(self, tasks=kept, bad=(*self.bad, *refused))

    def num_tasks_of(self, num_answers: int) -> int:
        """How many give so many answers, on average over their turns."""
        turns = sum(task.num_turns for task in self.tasks) / len(self.tasks)
        return math.ceil(num_answers / turns)

    def first(self, count: int) -> list[Task]:
        """So many tasks, categories in turn; asked again from the start where there are fewer.
        The first 8 are among the first 16."""
        tasks = in_turn(self.tasks)[:count]
        while len(tasks) < count:
            number, source = divmod(len(tasks), len(self.tasks))
            task = tasks[source]
            tasks.append(replace(task, id=f"{task.id}{ROUNDS}{number + 1}"))
        return tasks


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


def in_turn(items: Sequence[Categorized]) -> list[Categorized]:
    """One of each category, then the next of each: files often hold one after another."""
    by_category: dict[str, list[Categorized]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    rounds = zip_longest(*by_category.values())
    return [item for group in rounds for item in group if item is not None]


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

"""A task is one conversation; a workload is a named list of tasks. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

from peagle.bench.results.document import WorkloadInfo
from peagle.data.prompts import BadPrompt, Conversation

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
    max_tokens: int | None = None  # in an answer, where the workload fixes it
    ignore_eos: bool = False

    @property
    def sha256(self) -> str:
        """Hashes what is asked, in its order; names and categories do not change the work."""
        asked = [[t.system, *t.turns, t.num_random_tokens] for t in self.tasks]
        content = json.dumps([asked, self.raw, self.max_tokens, self.ignore_eos])
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def info(self) -> WorkloadInfo:
        categories = Counter(task.category for task in self.tasks if task.category)
        return WorkloadInfo(
            self.name, self.sha256, len(self.tasks), dict(categories), len(self.bad), self.raw
        )

    def without(self, refused: Sequence[BadPrompt]) -> Workload:
        """Leaves out tasks that a model cannot take; `where` of each is the task's id."""
        names = {bad.where for bad in refused}
        kept = tuple(task for task in self.tasks if task.id not in names)
        return replace(self, tasks=kept, bad=(*self.bad, *refused))

    def num_tasks_of(self, num_answers: int) -> int:
        """The number of tasks that give `num_answers` answers, on average over their turns."""
        turns = sum(task.num_turns for task in self.tasks) / len(self.tasks)
        return math.ceil(num_answers / turns)

    def first(self, count: int) -> list[Task]:
        """`count` tasks, categories in turn; they are asked again from the start where there are
        fewer. The first 8 are among the first 16."""
        tasks = in_turn(self.tasks)[:count]
        while len(tasks) < count:
            number, source = divmod(len(tasks), len(self.tasks))
            task = tasks[source]
            tasks.append(replace(task, id=f"{task.id}{ROUNDS}{number + 1}"))
        return tasks


def in_turn(items: Sequence[Categorized]) -> list[Categorized]:
    """One of each category, then the next of each: files often hold one after another."""
    by_category: dict[str, list[Categorized]] = {}
    for item in items:
        by_category.setdefault(item.category, []).append(item)
    rounds = zip_longest(*by_category.values())
    return [item for group in rounds for item in group if item is not None]

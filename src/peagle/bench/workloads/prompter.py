"""Tasks -> messages, text or token ids, by one model's tokenizer and chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peagle.bench.workloads.workload import Task, Workload
from peagle.data.prompts import BadPrompt
from peagle.engine.prompts import PromptReader, TokenizedPrompt
from peagle.errors import ConfigError, DataError, RequestError


class Prompter:
    def __init__(self, tokenizer: Any, *, raw: bool = False, seed: int = 0) -> None:
        self.tokenizer, self.raw, self.seed = tokenizer, raw, seed
        self._reader = PromptReader(tokenizer)
        self._first_turns: dict[Task, TokenizedPrompt] = {}  # every run of a grid asks for them

    def prompt(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
        """The turn that follows the answers given so far."""
        if answers:
            return self._read(task, answers)
        source = replace(task, id=task.source_id)
        if source not in self._first_turns:
            self._first_turns[source] = self._read(task, ())
        return self._first_turns[source]

    def _read(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
        if task.num_random_tokens:
            return TokenizedPrompt(None, random_tokens(self.tokenizer, task, self.seed))
        if self.raw:
            return self._reader.read(raw_text(task, answers))
        if not self.tokenizer.chat_template:
            raise ConfigError("this model has no chat template", hint="add --raw")
        return self._reader.read(messages(task, answers))


def random_tokens(tokenizer: Any, task: Task, seed: int) -> list[int]:
    """Ordinary tokens: special ones could end or restructure the prompt."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    return random.Random(f"{seed}/{task.source_id}").choices(ordinary, k=task.num_random_tokens)


def without_misfits(workload: Workload, prompter: Prompter, max_model_len: int) -> Workload:
    """Sets aside tasks whose first turn the model cannot take; they count as bad rows."""
    refused = []
    for task in workload.tasks:
        try:
            length = len(prompter.prompt(task, ()).token_ids)
        except RequestError as error:
            refused.append(BadPrompt(task.id, error.message))
            continue
        if not 0 < length < max_model_len:
            refused.append(
                BadPrompt(task.id, f"it has {length} tokens, the context {max_model_len}")
            )
    if len(refused) == len(workload.tasks):
        raise DataError(
            f"no prompt of {workload.name} fits the model; {refused[0].where}: {refused[0].error}"
        )
    return workload.without(refused) if refused else workload


def messages(task: Task, answers: Sequence[str]) -> list[dict[str, str]]:
    """The conversation up to the turn that is due."""
    spoken = [] if task.system is None else [{"role": "system", "content": task.system}]
    for turn, answer in zip(task.turns, answers, strict=False):
        spoken.append({"role": "user", "content": turn})
        spoken.append({"role": "assistant", "content": answer})
    return [*spoken, {"role": "user", "content": task.turns[len(answers)]}]


def raw_text(task: Task, answers: Sequence[str]) -> str:
    """The same without a chat template."""
    spoken = [] if task.system is None else [task.system]
    for turn, answer in zip(task.turns, answers, strict=False):
        spoken += [turn, answer]
    return "\n".join([*spoken, task.turns[len(answers)]])

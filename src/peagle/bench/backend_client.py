"""Drives an engine of this process, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from peagle.backends.contract import Backend, OpenPrompt
from peagle.bench.calls import Answer, Call, Update
from peagle.bench.prompter import Prompter
from peagle.bench.workloads import Task
from peagle.engine.prompts import TokenizedPrompt


class BackendClient:
    def __init__(self, backend: Backend, prompter: Prompter) -> None:
        self.backend, self.prompter = backend, prompter
        self._open: dict[int, tuple[OpenPrompt, Call]] = {}

    def prompt(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
        return self.prompter.prompt(task, answers)

    def start(self, call: Call) -> None:
        opened = self.backend.open(call.prompt, call.params, streamed=True)
        self._open[id(opened)] = (opened, call)

    def wait(self, timeout: float | None) -> list[Update]:
        if not self._open:
            time.sleep(timeout or 0.0)
            return []
        changed = self.backend.step()
        now = time.perf_counter()
        return [self._update(opened, now) for opened in changed if id(opened) in self._open]

    def cancel(self) -> None:
        for opened, _ in self._open.values():
            self.backend.abort(opened)
        self._open.clear()

    def _update(self, opened: OpenPrompt, now: float) -> Update:
        call = self._open[id(opened)][1]
        if not opened.finished:
            return Update(call, now, opened.num_output_tokens)
        del self._open[id(opened)]
        output = opened.output()
        answer = output.outputs[0]
        return Update(
            call,
            now,
            len(answer.token_ids),
            Answer(
                answer.text, len(answer.token_ids), answer.token_ids, output.stats, answer.error
            ),
        )

"""Drives an engine of this process, step by step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from peagle.backends.contract import Backend
from peagle.bench.run.client import Call, ClientAnswer, Update
from peagle.bench.workloads.prompter import Prompter
from peagle.bench.workloads.workload import Task
from peagle.engine.offline import OpenPrompt
from peagle.engine.prompts import TokenizedPrompt
from peagle.errors import RequestError


class BackendClient:
    """Later turns become tokens in a thread of their own, as in front of a server: the engine
    would stand still for about a millisecond each, at the same moment for many of them."""

    def __init__(self, backend: Backend, prompter: Prompter) -> None:
        self.backend, self.prompter = backend, prompter
        self._open: dict[OpenPrompt, Call] = {}
        self._coming: deque[tuple[Future[TokenizedPrompt], Call]] = deque()
        self._writer: ThreadPoolExecutor | None = None

    def prompt(self, task: Task, answers: Sequence[str]) -> TokenizedPrompt:
        return self.prompter.prompt(task, answers)

    def start(self, call: Call) -> None:
        if call.prompt is not None:
            self._start(call)
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1)
        coming = self._writer.submit(self.prompter.prompt, call.task, call.answers)
        self._coming.append((coming, call))

    def wait(self, timeout: float | None) -> list[Update]:
        updates = self._start_written()
        if not self._open:
            if not updates:
                time.sleep(timeout or 0.0)
            return updates
        changed = self.backend.step()
        now = time.perf_counter()
        for opened in changed:
            call = self._open.get(opened)
            if call is not None:
                ended = self._end(opened) if opened.finished else None
                updates.append(Update(call, now, opened.num_output_tokens, ended))
        return updates

    def cancel(self) -> None:
        for opened in self._open:
            self.backend.abort_request(opened)
        self._open.clear()
        self._coming.clear()

    def _start_written(self) -> list[Update]:
        """Starts the turns that are written; waits for one where the engine has nothing to do.
        -> those that cannot be served."""
        refused = []
        while self._coming and (self._coming[0][0].done() or not self._open):
            coming, call = self._coming.popleft()
            try:
                call.prompt = coming.result()
                self._start(call)
            except RequestError as error:
                answer = ClientAnswer("", 0, error=error.message, refused=True)
                refused.append(Update(call, time.perf_counter(), 0, answer))
        return refused

    def _start(self, call: Call) -> None:
        opened = self.backend.add_request(call.prompt, call.params, streamed=True)
        self._open[opened] = call

    def _end(self, opened: OpenPrompt) -> ClientAnswer:
        del self._open[opened]
        output = opened.output()
        answer = output.outputs[0]
        tokens = answer.token_ids
        return ClientAnswer(answer.text, len(tokens), tokens, output.stats, answer.error)

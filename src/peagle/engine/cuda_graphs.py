"""A step as a CUDA graph: captured when it is first used, replayed from then on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peagle.engine.clock import Mark
from peagle.engine.step import Step

WARM_UPS = 2  # Triton compiles and cuBLAS chooses before anything is captured
TIMED_RUNS = 3  # behind one that brings the graph to the device


class GraphMemory:
    """What all graphs of an engine share: they run in order, one at a time. Captured on a stream of
    its own, to which cuBLAS binds its workspace."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]


class GraphedStep:
    """Captured with the inputs it was made with, which name the padding slot alone, so that warming
    up disturbs nobody, nor does timing it."""

    def __init__(self, step: Step, memory: GraphMemory) -> None:
        self._inputs = step.inputs
        self._given: Tensor | None = None  # what the device has
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not `torch.cuda.graph`: it collects all of Python's garbage before each capture.
        with torch.cuda.stream(memory.stream), _no_collection():
            for _ in range(WARM_UPS):
                step()
            self._graph.capture_begin(pool=memory.pool)
            try:
                self._report = step()
            finally:
                self._graph.capture_end()
            self.seconds = self._timed()
        torch.cuda.current_stream().wait_stream(memory.stream)

    def _timed(self) -> float:
        """Seconds of a run, but for the context that nobody's rows have none of."""
        self._graph.replay()
        begun = Mark(self._report.device)
        for _ in range(TIMED_RUNS):
            self._graph.replay()
        ended = Mark(self._report.device)
        ended.wait()
        return ended.since(begun) / TIMED_RUNS

    def run(self, inputs: Tensor) -> tuple[Tensor, Mark]:
        """-> the report, which the next run overwrites, and when the step began."""
        if self._given is None or not torch.equal(inputs, self._given):
            self._inputs.copy_(inputs.pin_memory(), non_blocking=True)
            self._given = inputs
        begun = Mark(self._report.device)
        self._graph.replay()
        return self._report, begun


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage may hold events or graphs, which must not be freed while another is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

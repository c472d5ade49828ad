"""Steps that are made when first used and kept; on a GPU each is one CUDA graph.

A run copies its inputs to the device, starts the step and the copy of its report back, and
returns at once. Copies go through pinned memory, which torch keeps until they are done, so the
host waits for nothing until it reads a report.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.lanes.caches import LaneModels
from peagle.engine.lanes.steps import DecodeShape, DecodeStep, PrefillShape, PrefillStep

WARM_UPS = 2  # Triton compiles and cuBLAS chooses before anything is captured


class Step(Protocol):
    inputs: Tensor  # int64, the device's copy of what the host says

    def __call__(self) -> Tensor: ...


class Report:
    """What a step tells the host; `rows` waits for it, and so for both marks."""

    def __init__(self, device_report: Tensor, begun: Mark) -> None:
        self.begun = begun
        self._host = device_report
        if device_report.is_cuda:
            self._host = torch.empty_like(device_report, device="cpu", pin_memory=True)
            self._host.copy_(device_report, non_blocking=True)
        self.ended = Mark(device_report.device)

    def rows(self) -> NDArray[np.int64]:
        self.ended.wait()
        rows: NDArray[np.int64] = self._host.numpy()
        return rows


class Mark:
    """A moment in what the device does; on the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._time = perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def later(self, other: Mark | None) -> Mark:
        return self if other is None or self.since(other) > 0 else other

    def since(self, earlier: Mark) -> float:
        if self._event is None:
            return self._time - earlier._time
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class Queue:
    """Work that the device does in order. Graphs of two queues may run at the same time: so each
    has its own memory, and its own stream to capture on, to which cuBLAS binds its workspace."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.capturing = torch.cuda.Stream()  # type: ignore[no-untyped-call]


class DirectStep:
    """The plain twin of GraphedStep: runs the step as it is."""

    def __init__(self, step: Step) -> None:
        self.step = step

    def run(self, inputs: Tensor) -> Report:
        begun = Mark(inputs.device)
        self.step.inputs.copy_(inputs)
        return Report(self.step(), begun)


class GraphedStep:
    """The step as a CUDA graph. Captured with the inputs it was made with, which name the dummy
    lane alone, so that warming up disturbs nobody."""

    def __init__(self, step: Step, queue: Queue) -> None:
        self.step = step
        self._given: Tensor | None = None  # what the device has
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not `torch.cuda.graph`: it collects all of Python's garbage before each capture.
        with torch.cuda.stream(queue.capturing), _no_collection():
            for _ in range(WARM_UPS):
                step()
            self._graph.capture_begin(pool=queue.pool)
            try:
                self._report = step()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(queue.capturing)

    def run(self, inputs: Tensor) -> Report:
        if self._given is None or not torch.equal(inputs, self._given):
            self.step.inputs.copy_(inputs.pin_memory(), non_blocking=True)
            self._given = inputs
        begun = Mark(self._report.device)
        self._graph.replay()
        return Report(self._report, begun)


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


class Steps:
    """All steps of an engine, by shape. Prefill steps run beside the decode steps that follow
    them, on a stream of their own, until `join_prefill`."""

    def __init__(self, models: LaneModels) -> None:
        self.models = models
        self._decode: dict[DecodeShape, DirectStep | GraphedStep] = {}
        self._prefill: dict[PrefillShape, DirectStep | GraphedStep] = {}
        self._decode_queue: Queue | None = None
        self._prefill_queue: Queue | None = None
        if models.device.type == "cuda":
            self._decode_queue, self._prefill_queue = Queue(), Queue()
            self._prefill_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def num_made(self) -> int:
        return len(self._decode) + len(self._prefill)

    def decode(self, shape: DecodeShape, lanes: Sequence[int]) -> Report:
        if shape not in self._decode:
            self._decode[shape] = _made(DecodeStep(self.models, shape), self._decode_queue)
        padding = [self.models.state.dummy] * (shape.batch - len(lanes))
        return self._decode[shape].run(torch.tensor([*lanes, *padding]))

    def prefill(self, shape: PrefillShape, inputs: Tensor) -> Report:
        """Begins after everything launched so far."""
        if shape not in self._prefill:
            self._prefill[shape] = _made(PrefillStep(self.models, shape), self._prefill_queue)
        if self._prefill_queue is None:
            return self._prefill[shape].run(inputs)
        self._prefill_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._prefill_stream):
            return self._prefill[shape].run(inputs)

    def join_prefill(self) -> None:
        """What is launched from here on begins after all prefill steps."""
        if self._prefill_queue is not None:
            torch.cuda.current_stream().wait_stream(self._prefill_stream)


def _made(step: Step, queue: Queue | None) -> DirectStep | GraphedStep:
    return DirectStep(step) if queue is None else GraphedStep(step, queue)

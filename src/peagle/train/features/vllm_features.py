"""Features from a target that runs in vLLM: tensor parallel, on other GPUs, on another machine.

vLLM hands over the residual stream after the aux layers and after the last one; the final
norm, the embedding and the output table are all that we hold of the target ourselves.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.errors import DataError
from peagle.models.target import TargetModel
from peagle.teacher_forcing.features import Features, Fetched, PromisedStates, StoredStates
from peagle.train.features.vllm_client import DocumentStates, StatesClient

PROBE_TOKENS = 8
LARGEST_GAP = 0.02  # of the largest logit: what bf16 may lose; other states miss by far more
Job = tuple[Callable[[], None], "Future[None]"]


class VllmFeatures:
    """One request per document; as many in flight as there are workers, over all rows."""

    def __init__(
        self,
        client: StatesClient,
        target: TargetModel,  # its layers are not used
        aux_hidden_state_layers: tuple[int, ...],
        *,
        num_requests: int,
    ) -> None:
        self.client, self.target, self.aux_hidden_state_layers = (
            client,
            target,
            aux_hidden_state_layers,
        )
        self.device = target.embed_tokens.weight.device
        self._columns = [client.layer_ids.index(layer) for layer in aux_hidden_state_layers]
        self._last = client.layer_ids.index(target.config.num_hidden_layers)
        self.dtype = self._probe()
        self._workers = Workers(num_requests, "vllm-states")
        self.close = weakref.finalize(self, self._workers.close)
        self.close.atexit = False  # daemons: nobody waits for an answer when the program ends

    def fetch(self, row: PackedRow) -> PromisedStates:
        """Returns at once: the next rows can be asked for while these states are on their way."""
        size, length = self.target.config.hidden_size, len(row.token_ids)
        aux_hidden_states = self._buffer(length, len(self._columns) * size)
        stored = StoredStates(aux_hidden_states, self._buffer(length, size))
        jobs = [functools.partial(self._fill, row, place, stored) for place in documents(row)]
        return PromisedStates(stored, [self._workers.submit(job) for job in jobs])

    @torch.no_grad()
    def __call__(self, row: PackedRow, fetched: Fetched) -> Features:
        assert isinstance(fetched, PromisedStates)
        stored = fetched.wait()
        dtype = self.target.embed_tokens.weight.dtype
        tokens = row.token_ids.to(self.device, non_blocking=True)
        aux_hidden_states = stored.aux_hidden_states.to(self.device, dtype, non_blocking=True)
        states = stored.states.to(self.device, dtype, non_blocking=True)
        return Features(tokens.roll(-1), aux_hidden_states, self.target.norm(states))

    def _fill(self, row: PackedRow, place: slice, stored: StoredStates) -> None:
        answer = self.client(row.token_ids[place])
        self._check_size(answer)
        stored.aux_hidden_states[place] = answer.hidden[:, self._columns].flatten(1)
        stored.states[place] = answer.hidden[:, self._last]

    def _buffer(self, length: int, width: int) -> Tensor:
        """Zeros, for padding has no states; page-locked where a GPU will read it."""
        on_gpu = self.device.type == "cuda"
        return torch.zeros(length, width, dtype=self.dtype, pin_memory=on_gpu)

    @torch.no_grad()
    def _probe(self) -> torch.dtype:
        """-> the server's dtype. Its choice after a few tokens must follow from our tables:
        another checkpoint, norm or last layer would train without an error."""
        tokens = torch.arange(min(PROBE_TOKENS, self.target.config.vocab_size))
        answer = self.client(tokens)
        self._check_size(answer)
        last = answer.hidden[-1, self._last].to(self.target.embed_tokens.weight)
        logits = self.target.logits(self.target.norm(last[None]))[0]
        gap = float(logits.max() - logits[answer.next_token])
        if gap > LARGEST_GAP * float(logits.abs().max()):
            raise DataError(
                "vLLM's choice of a token does not follow from its hidden states and our tables",
                hint="it must serve the recipe's target.model itself",
            )
        return answer.hidden.dtype

    def _check_size(self, answer: DocumentStates) -> None:
        found, expected = answer.hidden.shape[-1], self.target.config.hidden_size
        if found != expected:
            raise DataError(
                f"vLLM's hidden states are {found} wide, the target's are {expected}",
                hint="it must serve the recipe's target.model itself",
            )


def documents(row: PackedRow) -> Iterator[slice]:
    """The places of the row's documents, without padding."""
    lengths = torch.bincount(row.document)[: len(row.indices)].tolist()
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


class Workers:
    """A pool of threads; ThreadPoolExecutor would finish all that waits before Python may exit."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """What waits is never done; what runs comes to its end."""
        with contextlib.suppress(queue.Empty):
            while (waiting := self._jobs.get_nowait()) is not None:
                waiting[1].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a job may hold the last reference
                thread.join()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, job, future  # or what the job holds lives until the next one comes

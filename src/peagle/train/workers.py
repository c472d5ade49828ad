"""A few threads that do what is submitted and never hold up the end of the program."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Job = tuple[Callable[[], None], "Future[None]"]


class Workers:
    """As ThreadPoolExecutor, which would finish all that waits before Python may exit."""

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

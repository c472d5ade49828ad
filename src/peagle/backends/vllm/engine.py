"""Starting vLLM's engine from this process, and ending what it started."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from peagle.backends.vllm.log import last_words
from peagle.errors import BackendError

logger = logging.getLogger(__name__)


def start_engine(keywords: Mapping[str, Any], *, world_size: int) -> Any:
    """vLLM's LLMEngine; with one worker in this process, so that nothing can be left behind."""
    set_environment(world_size)
    printed = Printed()
    try:
        with printed.captured():
            from vllm import EngineArgs, LLMEngine

            return LLMEngine.from_engine_args(EngineArgs(**keywords_for_platform(keywords)))
    except (Exception, SystemExit) as error:
        end_children()
        text = printed.text()
        logger.info("vLLM printed:\n%s", text)
        raised = "".join(traceback.format_exception_only(error))
        words = last_words([*raised.splitlines(), *text.splitlines()])
        raise BackendError(
            f"vLLM did not start: {words}", hint="-v shows all that it printed"
        ) from error


@functools.cache
def verifies_sampled_drafts() -> bool:
    """False for builds whose temperature, top_k and top_p of drafted rows are left unset.

    vLLM 0.32.0 on a CPU spreads them over a request's rows in a copy that it throws away, so
    drafts of sampled requests would be verified by whatever lies in memory. Tried out, since a
    later version may have mended it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return True
    import torch

    try:
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl
    except ImportError:
        return True
    current_platform.import_kernels()  # an engine in other processes has loaded them there
    rows = torch.zeros(2)
    _expand_kernel_impl(rows, torch.ones(1), torch.tensor([2], dtype=torch.int32), 0, 0)
    return bool(rows.all())


def shut_down(engine: Any) -> None:
    """Ends the engine's processes, or frees its memory where it lives in this one."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with contextlib.suppress(Exception):  # it may be dead already
        engine.engine_core.shutdown(timeout=10.0)  # then it is killed
    cleanup_dist_env_and_memory()
    end_children()


def end_children() -> None:
    """Workers of an engine that died half-way have nothing left to lose."""
    for child in multiprocessing.active_children():
        if not child.name.startswith(("EngineCore", "VllmWorker")):
            continue
        child.terminate()
        child.join(timeout=10)
        if child.is_alive():
            child.kill()
            child.join()


def set_environment(world_size: int) -> None:
    """Defaults alone: what the user has set stays."""
    if world_size == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for data
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def keywords_for_platform(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`auto` on a CPU is float32, as in the embedded engine; vLLM would cast down to bfloat16."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and keywords.get("dtype", "auto") == "auto":
        return {**keywords, "dtype": "float32"}
    return dict(keywords)


class Printed:
    """What vLLM and its processes print while they start, kept off the user's terminal."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 workers write to it while they live

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """File descriptors, not sys.stderr: C++ code and other processes write there, too."""
        sys.stdout.flush()
        sys.stderr.flush()
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in saved:
                os.dup2(self._file.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)

    def text(self) -> str:
        self._file.seek(0)
        return self._file.read().decode("utf-8", "replace")

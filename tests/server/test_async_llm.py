"""The HTTP side of the engine's connection, with nobody or only a test at the other end."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from peagle.engine.prompts import TokenizedPrompt
from peagle.sampling_params import SamplingParams
from peagle.server.async_llm import MAX_DIRECT_BYTES, AsyncLLM, Generation, OpenAnswers
from peagle.server.engine_loop import Abort, AskStatus, EngineStatus, Ready, Submit
from peagle.server.errors import ApiError
from peagle.server.metrics import ServerMetrics
from peagle.speculation.statistics import SpecDecodeStats

STATUS = EngineStatus(3, 2, 1, 0, 0, SpecDecodeStats())
READY = Ready(1 << 30, 100, 8, 10, 16, "none", 0)
PARAMS = SamplingParams()
LONG = list(range(1 << 20))  # token ids, more than the connection's buffer holds


def with_llm(work: Callable[[AsyncLLM, Connection], Any], timeout: float = 60.0) -> None:
    async def run() -> None:
        ours, theirs = multiprocessing.Pipe()
        metrics = ServerMetrics("tiny")
        llm = AsyncLLM(ours, None, max_waiting=8, timeout=timeout, observer=metrics)  # type: ignore[arg-type]
        llm.start()
        theirs.send(READY)
        await llm.wait_until_ready()
        try:
            await work(llm, theirs)
        finally:
            llm.close()
            theirs.close()

    asyncio.run(run())


def opened(llm: AsyncLLM, token_ids: list[int]) -> Generation:
    return llm.generate([TokenizedPrompt(None, token_ids)], PARAMS)


def test_commands_come_in_order_be_they_short_or_longer_than_the_buffer() -> None:
    async def work(llm: AsyncLLM, theirs: Connection) -> None:
        sizes = [3, len(LONG), 3, MAX_DIRECT_BYTES, 3, 3]
        for size in sizes:
            opened(llm, LONG[:size])
        got = [await asyncio.to_thread(theirs.recv) for _ in sizes]
        assert [(one.key, len(one.token_ids)) for one in got] == list(enumerate(sizes))
        await asyncio.sleep(0.05)  # the sender's thread has said that it is done
        opened(llm, [1])
        assert theirs.poll()  # sent by this thread
        assert theirs.recv() == Submit(len(sizes), [1], PARAMS)

    with_llm(work)


def test_an_answer_that_takes_too_long_is_aborted_though_nobody_reads_it() -> None:
    """A client that does not read holds up who writes to it, but not the engine."""

    async def work(llm: AsyncLLM, theirs: Connection) -> None:
        generation = opened(llm, [1])
        assert await asyncio.to_thread(theirs.recv) == Submit(0, [1], PARAMS)
        assert await asyncio.to_thread(theirs.recv) == Abort(0)
        assert llm.num_open == 0
        with pytest.raises(ApiError, match="took longer"):
            await generation.next()
        generation.close()

    with_llm(work, timeout=0.05)


def test_closing_does_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.server.async_llm.JOIN_SECONDS", 0.05)

    async def work(llm: AsyncLLM, theirs: Connection) -> None:
        generation = opened(llm, LONG)  # nobody reads it
        asyncio.get_running_loop().call_later(0.05, llm.close)
        with pytest.raises(ApiError, match="has stopped"):
            await generation.next()
        generation.close()

    with_llm(work)


def test_two_api_servers_keep_one_bound_between_them() -> None:
    counts = [0, 0]
    first, second = OpenAnswers(counts, 0), OpenAnswers(counts, 1)
    assert first.add(3, 5)
    assert not second.add(3, 5)
    assert second.add(2, 5)
    assert not first.add(1, 5)
    first.remove(3)
    assert second.add(3, 5)
    assert (first.total, counts) == (5, [0, 5])


def test_a_status_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.server.async_llm.STATUS_SECONDS", 0.02)

    async def work(llm: AsyncLLM, theirs: Connection) -> None:
        await llm.renew_status()
        assert isinstance(theirs.recv(), AskStatus)
        await llm.renew_status()  # asks no second time: the first may still be answered
        theirs.send(STATUS)
        await llm.renew_status()
        assert llm.status == STATUS
        assert not theirs.poll()

    with_llm(work)


def test_the_first_error_of_a_request_is_the_one_it_gets() -> None:
    async def work(llm: AsyncLLM, theirs: Connection) -> None:
        generation = opened(llm, [1])
        generation.fail(ApiError(400, "first"))
        generation.fail(ApiError(499, "the client has gone"))
        with pytest.raises(ApiError, match="first"):
            await generation.next()
        generation.close()
        assert llm.num_open == 0

    with_llm(work)

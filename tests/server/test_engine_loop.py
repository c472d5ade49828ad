"""The engine's loop over a connection, without HTTP: cancelling, failing, falling behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from peagle.config import EngineConfig
from peagle.engine.llm import LLM
from peagle.engine.request import DraftTree
from peagle.sampling_params import SamplingParams
from peagle.server.engine_loop import (
    Abort,
    AskStatus,
    EngineLoop,
    Failed,
    Ready,
    Report,
    Submit,
    run_engine,
    warm_llm,
)

from .conftest import make_llm
from .running import wait_for

TOO_LONG = EngineConfig(device="cpu", max_model_len=100_000)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model_folder: Path, head_folder: Path) -> LLM:
    return make_llm(model_folder, head_folder)


def one_round(loop: EngineLoop) -> None:
    assert loop._take_commands()
    loop._step()
    loop._report()


def test_a_cancelled_request_s_blocks_are_free_before_the_next_step(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    loop, allocator = EngineLoop(llm, [theirs]), llm.engine.allocator
    for key in range(3):
        ours.send(Submit(key, [1, 2, 3], LONG))
    one_round(loop)
    assert allocator.num_free < allocator.num_blocks
    for key in range(3):
        ours.send(Abort(key))
    assert loop._take_commands()
    assert allocator.num_free == allocator.num_blocks
    assert not llm.engine.has_unfinished


def test_a_reader_that_falls_behind_gets_fewer_reports_and_every_token(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    loop, is_busy = EngineLoop(llm, [theirs]), [True]
    loop._channels[0].has_room = lambda: not is_busy[0]  # type: ignore[method-assign]
    ours.send(Submit(0, [1, 2, 3], LONG))
    for _ in range(10):
        one_round(loop)
    assert not ours.poll()
    is_busy[0] = False
    one_round(loop)
    report: Report = ours.recv()
    assert not report.news
    ((key, number, token_ids, tokens_per_step),) = report.growths
    assert (key, number) == (0, 0)
    assert len(tokens_per_step) >= 10
    assert len(token_ids) == sum(tokens_per_step)
    expected = llm.generate({"prompt_token_ids": [1, 2, 3]}, LONG)[0].outputs[0].token_ids
    assert token_ids == expected[: len(token_ids)]
    ours.send(Abort(0))
    one_round(loop)


def test_answers_in_progress_wait_for_their_turn_but_first_tokens_and_ends_do_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.server.engine_loop.SECONDS_PER_CHUNK", 1e6)
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(llm, [theirs])
    keys: list[list[int]] = []
    tokens: dict[int, list[int]] = {0: [], 1: []}
    ours.send(Submit(0, [1, 2, 3], LONG))
    for step in range(400):
        one_round(loop)
        if step == 4:
            ours.send(Submit(1, [1, 2, 3], replace(LONG, max_tokens=40)))
        while ours.poll():
            report: Report = ours.recv()
            told = [(key, token_ids) for key, _, token_ids, _ in report.growths]
            told += [(one.key, one.answers[0].token_ids) for one in report.news]
            keys.append([key for key, _ in told])
            for key, token_ids in told:
                tokens[key] += token_ids
        if not loop._open:
            break
    assert keys == [[0], [1], [1], [0]]
    expected = llm.generate({"prompt_token_ids": [1, 2, 3]}, LONG)[0].outputs[0].token_ids
    assert (tokens[0], tokens[1]) == (expected, expected[:40])


def test_channels_share_the_engine_and_neither_hears_of_the_other_s_requests(llm: LLM) -> None:
    """Keys are a channel's own. One that closes ends its requests and no others."""
    pairs = [multiprocessing.Pipe() for _ in range(2)]
    loop = EngineLoop(llm, [theirs for _, theirs in pairs])
    first, second = (ours for ours, _ in pairs)
    first.send(Submit(0, [1, 2, 3], LONG))
    second.send(Submit(0, [4, 5], replace(LONG, max_tokens=20)))
    one_round(loop)
    assert len(llm.engine.scheduler.running) == 2
    first.close()
    one_round(loop)
    assert len(llm.engine.scheduler.running) == 1
    tokens: list[int] = []
    while loop._open or second.poll():
        one_round(loop)
        while second.poll():
            report: Report = second.recv()
            tokens += [t for growth in report.growths for t in growth[2]]
            tokens += [t for one in report.news for t in one.answers[0].token_ids]
    expected = llm.generate({"prompt_token_ids": [4, 5]}, replace(LONG, max_tokens=20))
    assert tokens == expected[0].outputs[0].token_ids
    second.close()
    assert not loop._take_commands()


def test_a_reader_that_is_busy_with_nothing_left_to_do_gets_its_end_later(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    loop, is_busy = EngineLoop(llm, [theirs]), [True]
    loop._channels[0].has_room = lambda: not is_busy[0]  # type: ignore[method-assign]
    ours.send(Submit(0, [1, 2, 3], replace(LONG, max_tokens=1)))
    for _ in range(5):  # does not wait for a command
        one_round(loop)
    assert not loop._open
    assert not ours.poll()
    is_busy[0] = False
    one_round(loop)
    (news,) = ours.recv().news
    assert news.answers[0].finish_reason == "length"


def test_a_channel_that_asks_is_told_how_the_engine_is(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(llm, [theirs])
    ours.send(Submit(0, [1, 2, 3], LONG))
    one_round(loop)
    assert isinstance(ours.recv(), Report)
    ours.send(AskStatus())
    assert loop._take_commands()
    status = ours.recv()
    assert (status.num_running, status.num_waiting) == (1, 0)
    assert status.num_free_blocks == llm.engine.allocator.num_free < llm.engine.allocator.num_blocks
    ours.send(Abort(0))
    one_round(loop)


@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_trees_of_a_request_hold_its_answer(
    model_folder: Path, head_folder: Path, nodes: int | None, temperature: float
) -> None:
    """What the target took of each, and its own token behind that, is the answer."""
    llm = make_llm(model_folder, head_folder, nodes)
    params = replace(LONG, max_tokens=60, temperature=temperature, seed=3)
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(llm, [theirs])
    ours.send(Submit(0, [1, 2, 3], params, shows_trees=True))
    ours.send(Submit(1, [1, 2, 3], params))
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    trees: list[DraftTree] = []
    while not ours.poll() or loop._open:
        one_round(loop)
        while ours.poll():
            report: Report = ours.recv()
            for key, _, tokens, _ in report.growths:
                token_ids[key] += tokens
            for news in report.news:
                token_ids[news.key] += news.answers[0].token_ids
                assert (news.answers[0].trees is not None) == (news.key == 0)
                trees += news.answers[0].trees or ()
        if not loop._open:
            break
    taken = []
    for tree in trees:
        assert all(0 <= parent < n for n, parent in enumerate(tree.parents, start=1))
        assert [tree.parents[n - 1] for n in tree.accepted] == [0, *tree.accepted][:-1]
        taken += [tree.token_ids[n - 1] for n in tree.accepted] + [tree.bonus_token_id]
    assert token_ids[0] == token_ids[1]
    drafted = token_ids[0][1:]  # the first comes with the prompt
    assert abs(len(drafted) - len(taken)) <= 4  # a last step without drafts, or beyond the end
    assert drafted[: len(taken)] == taken[: len(drafted)]
    is_chain = [tree.parents == list(range(len(tree.parents))) for tree in trees]
    assert all(is_chain) == (nodes is None)


def run_in_thread(theirs: Connection, make: Any) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(ValueError):  # what the engine of a test fails with
            run_engine([theirs], make)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_the_loop_ends_with_its_connection_and_leaves_nothing_open(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    thread = run_in_thread(theirs, lambda: llm)
    assert isinstance(ours.recv(), Ready)
    ours.send(Submit(0, [1, 2, 3], LONG))
    assert isinstance(ours.recv(), Report)
    ours.close()
    thread.join(60)
    assert not thread.is_alive()
    wait_for(lambda: llm.engine.allocator.num_free == llm.engine.allocator.num_blocks)


def test_an_engine_that_fails_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(llm, "step", fail)
    ours, theirs = multiprocessing.Pipe()
    run_in_thread(theirs, lambda: llm)
    assert isinstance(ours.recv(), Ready)
    ours.send(Abort(7))
    failed = ours.recv()
    assert isinstance(failed, Failed)
    assert "broken" in failed.message
    assert not failed.is_users


def test_a_model_that_cannot_be_loaded_is_the_user_s_error(model_folder: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    run_in_thread(theirs, lambda: warm_llm(str(model_folder), TOO_LONG, None))
    failed = ours.recv()
    assert failed.is_users
    assert "exceeds the target's context" in failed.message
    assert failed.hint is not None


def test_what_the_engine_refuses_is_told_with_its_reason(llm: LLM) -> None:
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(llm, [theirs])
    ours.send(Submit(5, [1], SamplingParams(num_speculative_tokens=60)))
    one_round(loop)
    (refused,) = ours.recv().refused
    assert refused.key == 5
    assert "60" in refused.message

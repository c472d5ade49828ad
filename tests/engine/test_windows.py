"""The cache frees what a sliding window has passed: no token changes, and more requests fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine import memory
from peagle.engine.blocks import BlockTable
from peagle.engine.engine import Engine
from peagle.engine.layer_groups import LayerGroups, group_layers, one_table
from peagle.engine.request import Request
from peagle.models.drafter import CacheLayout, Drafter
from peagle.models.target import TargetModel
from tests.tiny import drafters, engines, naive
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import CONTEXT, SHALLOW, VOCAB, head_drafter

WINDOWS: dict[str, tuple[int | None, ...]] = {
    "alternating": (6, None, 6, None),
    "two sizes": (3, 9, None),
    "everywhere": (6, 6, 6),
}
K, NODES = 3, 8


@cache
def make_target(windows: tuple[int | None, ...], dtype: torch.dtype) -> TargetModel:
    return SHALLOW.make_target(dtype, sliding_windows=windows, num_hidden_layers=len(windows))


def make_jobs(num_tokens: int = 30) -> list[Job]:
    """Some begin alike; all end far behind every window."""
    shared, params = prompts(1, seed=8, longest=1)[0] * 19, GREEDY
    params = dataclasses.replace(params, max_tokens=num_tokens)
    texts = [*prompts(3, seed=6, longest=3), *(shared + own for own in prompts(2, seed=4))]
    return [Job(text, params, joins=n) for n, text in enumerate([*texts, list(range(31))])]


def make_drafter(kind: str, target: TargetModel, jobs: Sequence[Job]) -> Drafter | None:
    known = naive.known(target, jobs)
    if kind == "none":
        return None
    if kind == "host":
        drafter = drafters.mixed(known)
        drafter.max_speculative_tokens = K
        return drafter
    changes = {"max_speculative_tokens": K, "num_speculative_tokens": K}
    if kind == "tree":
        network = SHALLOW.make_head(target, **changes)
        return drafters.ScriptedTrees(network, known, ranks=(0, 1, 8))
    if kind == "narrow p-eagle":
        changes["num_key_value_heads"] = 1
    network = SHALLOW.make_head(target, kind.split()[-1], **changes)
    return drafters.ScriptedHead(network, drafters.Script(known))


def watch(engine: Engine) -> None:
    """Whatever is freed becomes NaN: a row that still reads it shows. A block that the prefix cache
    keeps is not free."""
    allocator, caches = engine.allocator, [engine.runner.models.model.cache]
    if (drafting := engine.runner.models.drafting) is not None:
        caches.append(drafting.model.cache)
    pass_by = allocator.pass_by

    def spoiling(table: BlockTable, position: int) -> None:
        before = [group.held for group in table.groups]
        pass_by(table, position)
        for block in (b for held in before for b in held if allocator._pool.is_free(b)):
            slots = slice(block * allocator.block_size, (block + 1) * allocator.block_size)
            for cache_ in caches:
                cache_.keys[:, slots] = cache_.values[:, slots] = torch.nan

    allocator.pass_by = spoiling  # type: ignore[method-assign]


def block_bytes(engine: Engine) -> int:
    models = engine.runner.models
    caches = {models.model.cache.keys.data_ptr(): models.model.cache}
    if models.drafting is not None:
        cache_ = models.drafting.model.cache
        caches.setdefault(cache_.keys.data_ptr(), cache_)
    return sum(2 * c.keys[:, : engine.allocator.block_size].nbytes for c in caches.values())


def tight(target: TargetModel, drafter: Drafter | None, **options: Any) -> dict[str, int]:
    """Memory for one request of full length, and a little more: others are preempted."""
    engine = engines.make_engine(target, drafter, K, **options)
    per_request = engine.allocator.num_blocks // engine.scheduler.max_num_seqs
    return {"kv_cache_memory_bytes": (per_request + 1) * block_bytes(engine)}


def run(engine: Engine, jobs: Sequence[Job], aborted: int | None = None) -> list[Request]:
    """As engines.run; one request may be aborted when it has a few tokens. No table of a window
    ever holds more than its bound."""
    watch(engine)
    requests: list[Request] = []
    for step in range(2000):
        waiting = [job for job in jobs[len(requests) :] if job.joins <= step]
        requests += [engine.add_request("", job.prompt, job.params) for job in waiting]
        engine.step()
        if aborted is not None and requests[aborted:] and requests[aborted].num_outputs > 9:
            engine.abort_request(requests[aborted])
        tables = [r.table for r in requests if r.table is not None]
        engine.allocator.check(tables)
        engine.allocator.check_prefixes()
        for group in (group for table in tables for group in table.groups):
            assert group.window is None or len(group.held) <= group.window.max_blocks
        if len(requests) == len(jobs) and not engine.has_unfinished:
            assert engines.is_idle(engine)
            return requests
    raise AssertionError("the engine makes no progress")


@settings(max_examples=20)
@given(
    windows=st.sampled_from(sorted(WINDOWS)),
    kind=st.sampled_from(["none", "host", "p-eagle", "eagle3", "tree", "narrow p-eagle"]),
    static=st.booleans(),
    is_tight=st.booleans(),
    aborted=st.sampled_from([None, 0, 4]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    options=st.fixed_dictionaries(
        {
            "max_model_len": st.just(64),
            "block_size": st.sampled_from([1, 2, 4, 16]),
            "max_num_batched_tokens": st.sampled_from([12, 40, 2048]),
            "enable_prefix_caching": st.booleans(),
        }
    ),
)
def test_tokens_are_those_of_plain_decoding_far_behind_the_window(
    windows: str,
    kind: str,
    static: bool,
    is_tight: bool,
    aborted: int | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    """In chunks of prompts, with drafts, trees, preemption, aborts and prefix hits."""
    target, jobs = make_target(WINDOWS[windows], dtype), make_jobs()
    drafter = make_drafter(kind, target, jobs)
    options |= {"static": static, "nodes": NODES if kind == "tree" else None}
    if is_tight:
        options["max_num_batched_tokens"] = 12
        options |= tight(target, drafter, **options)
    engine = engines.make_engine(target, drafter, K, **options)
    if isinstance(drafter, drafters.ScriptedHead):
        drafter.engine = engine
    assert engine.allocator.has_windows
    requests = run(engine, jobs, aborted)
    for n, (request, job) in enumerate(zip(requests, jobs, strict=True)):
        expected = naive.answer(target, job)
        ends = request.num_outputs if n == aborted else len(expected)
        assert request.output_token_ids == expected[:ends]


@pytest.mark.parametrize(
    ("windows", "static"), [("alternating", True), ("two sizes", False), ("everywhere", True)]
)
def test_a_window_holds_no_more_blocks_however_long_the_answer(windows: str, static: bool) -> None:
    target = make_target(WINDOWS[windows], torch.float64)
    job = Job(prompts(1)[0], dataclasses.replace(GREEDY, max_tokens=75))
    drafter = make_drafter("p-eagle", target, [job])
    options: dict[str, Any] = {"max_num_batched_tokens": 8, "block_size": 2, "static": static}
    engine = engines.make_engine(target, drafter, K, **options)
    request, most = engine.add_request("", job.prompt, job.params), dict[int, int]()
    while engine.has_unfinished:
        engine.step()
        if request.table is not None:
            for n, group in enumerate(request.table.groups):
                most[n] = max(most.get(n, 0), len(group.held))
    rows = 3 * (K + 1)
    for n, window in enumerate(engine.allocator.windows):
        if window is None:
            assert most[n] >= 75 // 2
        else:
            assert window.size in WINDOWS[windows]
            assert most[n] <= window.max_blocks <= (window.size - 1 + rows) // 2 + 2


def keeps_all(target: CacheLayout, drafter: CacheLayout | None, **_: int) -> LayerGroups:
    num_drafter = 0 if drafter is None else drafter.num_layers
    return LayerGroups((None,), one_table(target.num_layers), one_table(num_drafter))


@pytest.mark.parametrize(
    ("windows", "method"), [((4, 4, 4, None), "p-eagle"), ((4, 4, 4, 4), None)]
)
def test_more_requests_fit_in_the_same_memory(
    windows: tuple[int | None, ...], method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(windows, torch.float64)
    jobs = [Job(p, dataclasses.replace(GREEDY, max_tokens=60)) for p in prompts(6)]
    drafter = None if method is None else head_drafter(SHALLOW.make_head(target, method))
    answers, preemptions = [], []
    for frees in (True, False):
        with monkeypatch.context() as patch:
            if not frees:
                patch.setattr(memory, "group_layers", keeps_all)
            room = engines.room_for(3 * CONTEXT, target, drafter)
            engine = engines.make_engine(target, drafter, K, max_num_batched_tokens=16, **room)
        requests = engines.run(engine, jobs)
        answers.append(engines.answers_of(requests))
        preemptions.append(sum(r.num_preemptions for r in requests))
    assert answers[0] == answers[1]
    assert preemptions[0] == 0 < preemptions[1]


def test_a_prompt_goes_on_when_others_hold_the_blocks_that_it_lets_go_of() -> None:
    """Those of a hit stay with the request that computed them."""
    target = make_target((4, 4), torch.float64)
    params, shared = dataclasses.replace(GREEDY, max_tokens=20), list(range(17))
    other = shared + [(5 * n + 3) % VOCAB for n in range(30)]
    jobs = [Job(shared, params), Job(other, params, joins=3)]
    options: dict[str, Any] = {"block_size": 1, "max_num_batched_tokens": 6, "max_model_len": 68}
    per_request, preemptions = 4 - 1 + 6 + 1, []
    size = block_bytes(engines.make_engine(target, **options))
    for num_blocks in range(per_request, 2 * per_request + 1):
        options["kv_cache_memory_bytes"] = num_blocks * size
        engine = engines.make_engine(target, enable_prefix_caching=True, **options)
        requests = run(engine, jobs)
        assert engine.allocator.num_blocks == num_blocks
        naive.check(target, requests, jobs)
        preemptions.append(sum(r.num_preemptions for r in requests))
    assert preemptions[-1] == 0 < max(preemptions)


def test_a_hit_needs_of_a_window_only_what_the_next_row_sees() -> None:
    target = make_target(WINDOWS["alternating"], torch.float64)
    options: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 2}
    engine = engines.make_engine(target, max_num_batched_tokens=8, **options)
    first = Job(list(range(30)), dataclasses.replace(GREEDY, max_tokens=9))
    (asked,) = run(engine, [first])
    again = Job([*first.prompt, *asked.output_token_ids, 5], first.params)
    (hit,) = run(engine, [again])
    assert hit.num_cached_tokens == 38  # all that was computed, by whole blocks
    naive.check(target, [hit], [again])
    early = Job([*first.prompt[:17], 3], first.params)  # its window was passed, and is still known
    (hit,) = run(engine, [early])
    assert hit.num_cached_tokens == 16
    naive.check(target, [hit], [early])


@settings(max_examples=100)
@given(
    windows=st.lists(st.sampled_from([None, 1, 4, 30, 500]), min_size=1, max_size=40),
    num_drafter=st.integers(0, 5),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    block_size=st.sampled_from([1, 4, 16]),
    longest=st.integers(1, 600),
    rows=st.integers(3, 300),
)
def test_each_layer_has_a_plane_of_a_table_that_keeps_what_it_sees(
    windows: list[int | None],
    num_drafter: int,
    widths: tuple[int, int],
    block_size: int,
    longest: int,
    rows: int,
) -> None:
    target = CacheLayout(len(windows), widths[0], 8, tuple(windows))
    drafter = CacheLayout(num_drafter, widths[1], 8) if num_drafter else None
    max_blocks = -(-longest // block_size)
    groups = group_layers(
        target, drafter, max_blocks=max_blocks, block_size=block_size, max_rows=rows, decode_rows=3
    )
    assert len(groups.target) == len(windows)
    assert len(groups.drafter) == num_drafter
    for size, place in zip(windows, groups.target, strict=True):
        kept = groups.windows[place.table]
        assert kept is None or kept.size == size
    assert all(groups.windows[place.table] is None for place in groups.drafter)
    assert {p.table for p in groups.target + groups.drafter} == set(range(len(groups.windows)))
    apart = [groups.target, groups.drafter]
    if groups.num_planes is not None:
        apart = [groups.target + groups.drafter]
        assert all(place.plane < groups.num_planes for place in apart[0])
    assert all(len(set(places)) == len(places) for places in apart)
    assert 0 < groups.blocks_for(max_blocks) <= max_blocks * len(groups.windows)


def test_layers_without_windows_have_one_table_and_caches_of_their_own() -> None:
    given = {"max_blocks": 100, "block_size": 4, "max_rows": 64, "decode_rows": 3}
    target, drafter = CacheLayout(5, 2, 8), CacheLayout(2, 4, 8)
    for windows in ((), (None,) * 5, (400,) * 5):  # the last is as long as requests are
        groups = group_layers(target._replace(windows=windows), drafter, **given)
        assert groups == LayerGroups((None,), one_table(5), one_table(2))

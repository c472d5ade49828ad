"""Prefix caching: answers are those without it, and what a known block holds is what its tokens
give when everything is computed again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.engine import Engine
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.llm import LLM
from peagle.engine.prefix_cache import extend_keys
from peagle.engine.request import Request
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.draft_limit import draft_limit, num_drafted_rows
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, VOCAB

from .test_cache_after_rejection import RecordingAttention
from .test_failures import PoisonousScript, poisoned
from .test_failures import head as broken_head
from .test_failures import jobs as breaking_jobs

SAMPLED = SamplingParams(seed=4, top_k=12, max_tokens=20, ignore_eos=True)


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def network(method: str, max_positions: int = 96) -> EagleNetwork:
    return SHALLOW.make_head(target(), method, max_position_embeddings=max_positions)


def scripted(net: EagleNetwork | None, answers: list[list[int]]) -> Any:
    """Drafts that are right now and then, by a head whose cache is in use."""
    return None if net is None else drafters.ScriptedHead(net, drafters.Script(answers))


def poison(engine: Engine) -> None:
    """What nobody has written must not look like something."""
    for cached in caches(engine):
        cached.keys.fill_(torch.nan)
        cached.values.fill_(torch.nan)


def caches(engine: Engine) -> list[PagedKVCache]:
    models = engine.runner.models
    return [m.cache for m in (models.model, models.drafting and models.drafting.model) if m]


@torch.inference_mode()
def recomputed(
    model: TargetModel, tokens: list[int], net: EagleNetwork | None
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all rows but the last: the target's, and the drafter's."""
    n = len(tokens) - 1
    layers = () if net is None else net.config.aux_hidden_state_layer_ids
    own = RecordingAttention(n)
    states = model(torch.tensor(tokens[:n]), torch.arange(n), own, layers).aux_hidden_states
    passes = [own]
    if net is not None:
        n = min(n, net.config.max_position_embeddings)
        passes.append(RecordingAttention(n))
        embeddings, features = net.embed(torch.tensor(tokens[1 : n + 1])), net.features(states[:n])
        net(embeddings, features, torch.arange(n), passes[-1])
    return [(torch.stack(one.keys), torch.stack(one.values)) for one in passes]


def check_known_blocks(
    engine: Engine, sequences: Sequence[list[int]], net: EagleNetwork | None
) -> int:
    """Each known block holds what its tokens give -> how many there are."""
    size, known = engine.allocator.block_size, dict(engine.allocator._prefixes._blocks)
    total = len(known)
    for tokens in sequences:
        for is_drafted in (False, True):
            keys: list[bytes] = []
            extend_keys(keys, tokens, size, is_drafted=is_drafted)
            found = {n: known.pop(key) for n, key in enumerate(keys) if key in known}
            made = recomputed(engine.target, tokens, net if is_drafted else None) if found else []
            for (kept, (wanted_keys, wanted_values)), (n, block) in (
                (pair, item)
                for pair in zip(caches(engine), made, strict=False)
                for item in found.items()
            ):
                rows, slots = (
                    slice(n * size, (n + 1) * size),
                    slice(block * size, (block + 1) * size),
                )
                torch.testing.assert_close(kept.keys[:, slots], wanted_keys[:, rows])
                torch.testing.assert_close(kept.values[:, slots], wanted_values[:, rows])
    assert not known, "a block is known by tokens that nobody had"
    return total


def conversation(rng: random.Random, count: int) -> list[Job]:
    """Requests that begin like others, and second turns: an earlier prompt with its answer."""
    jobs: list[Job] = []
    beginnings = prompts(2, rng.randrange(99), longest=16)
    for n in range(count):
        beginning = rng.choice(beginnings)
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        eos = tuple(rng.sample(range(VOCAB), 2))
        params = dataclasses.replace(
            rng.choice((GREEDY, SAMPLED)),
            max_tokens=rng.randint(1, 14),
            stop_token_ids=eos,
            num_speculative_tokens=rng.choice((None, None, None, 0, 2)),
            logit_bias=rng.choice(({}, {}, {3: 2.0})),
        )
        jobs.append(Job((beginning[: rng.randint(0, 16)] + tail)[:40], params, joins=2 * n))
        answer = naive.answer(target(), jobs[-1])
        beginnings.append(jobs[-1].prompt + answer[: rng.choice((len(answer), 5))])
    return jobs


@pytest.mark.slow
@settings(max_examples=20, deadline=None, phases=[Phase.generate])  # shrinking takes minutes
@given(
    seed=st.integers(0, 9999),
    method=st.sampled_from(
        ["plain", "p-eagle", "p-eagle tree", "eagle3", "eagle3 tree", "few positions"]
    ),
    static=st.booleans(),
    block_size=st.sampled_from([1, 2, 3, 5]),
    spare=st.integers(0, 60),
    budget=st.sampled_from([7, 64]),
)
def test_answers_and_known_blocks_are_right_under_any_load(
    seed: int, method: str, static: bool, block_size: int, spare: int, budget: int
) -> None:
    rng = random.Random(seed)
    jobs = conversation(rng, 7)
    sequences = naive.known(target(), jobs)
    net = None if method == "plain" else network("p-eagle", 24)
    if method.startswith(("p-eagle", "eagle3")):
        net = network(method.removesuffix(" tree"))
    drafter = scripted(net, sequences)
    nodes = 10 if method.endswith("tree") else None
    if net is not None and nodes:
        kind = drafters.ScriptedBeam if method == "eagle3 tree" else drafters.ScriptedTrees
        drafter = kind(net, sequences, ranks=(0, 1, 2, 9))
    room = 110 if method == "eagle3 tree" else 70  # for the rows of its beam
    options = engines.room_for(room + spare, target(), drafter) | {
        "nodes": nodes,
        "max_model_len": 60,
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": 3,
    }
    engine = engines.make_engine(target(), drafter, 4, static=static, **options)
    poison(engine)
    requests: list[Request] = []
    steps = 0
    aborted: set[int] = set()
    while len(requests) < len(jobs) or engine.has_unfinished:
        if len(requests) < len(jobs) and jobs[len(requests)].joins <= steps:
            job = jobs[len(requests)]
            requests.append(engine.add_request(str(len(requests)), job.prompt, job.params))
        engine.step()
        steps += 1
        assert steps < 500
        if rng.random() < 0.05:
            n = rng.randrange(len(requests))
            engine.abort_request(requests[n])
            aborted |= {n} if requests[n].finish_reason == "abort" else set()
        engine.allocator.check([r.table for r in requests if r.table is not None])
        engine.allocator.check_prefixes()
        if steps % 7 == 0:
            check_known_blocks(engine, sequences, net)
    check_known_blocks(engine, sequences, net)
    assert engines.is_idle(engine)
    for n, (request, job) in enumerate(zip(requests, jobs, strict=True)):
        output = naive.answer(target(), job)
        assert request.output_token_ids == output[: request.num_outputs if n in aborted else None]


@both_forms
@pytest.mark.parametrize("method", ["plain", "p-eagle", "eagle3"])
def test_a_second_turn_computes_only_what_is_new(method: str, static: bool) -> None:
    first = Job(prompts(1, seed=3, longest=30)[0][:13] + [5] * 10, GREEDY)
    answer = naive.answer(target(), first)
    second = Job([*first.prompt, *answer, 7, 8, 9], GREEDY)
    net = None if method == "plain" else network(method)
    drafter = scripted(net, naive.known(target(), [first, second]))
    engine = engines.make_engine(target(), drafter, 4, static=static)
    poison(engine)
    engines.run(engine, [first])
    before = len(engines.watched(engine).shapes)
    (request,) = engines.run(engine, [second])
    naive.check(target(), [request], [second])
    # The answer was cut by its limit: with K = 4 the drafter is sure of all but its last 7 rows.
    known = len(first.prompt) + len(answer) - (1 if net is None else 7)
    assert request.num_cached_tokens == known // 4 * 4
    prompt_rows = [s.num_items * s.rows_per_item for s in engines.watched(engine).shapes[before:]]
    if not static:
        assert sum(prompt_rows) == len(second.prompt) - 1 - request.num_cached_tokens
    stats = engine.prefix_cache_stats
    assert stats.queries == len(first.prompt) + len(second.prompt)
    assert stats.hits == request.num_cached_tokens


@both_forms
def test_rows_beyond_the_drafters_positions_are_not_known(static: bool) -> None:
    """Prompts take steps of 8 rows; a head of 24 positions reads three of them."""
    net = network("p-eagle", 24)
    jobs = [Job([n * 7 % VOCAB for n in range(40)], GREEDY), Job(list(range(20)), GREEDY)]
    sequences = naive.known(target(), jobs)
    options = {"max_num_batched_tokens": 8, "static": static}
    engine = engines.make_engine(target(), scripted(net, sequences), 4, **options)
    poison(engine)
    requests = engines.run(engine, jobs)
    check_known_blocks(engine, sequences, net)
    again = engines.run(engine, [Job(s, j.params) for s, j in zip(sequences, jobs, strict=True)])
    assert [r.num_cached_tokens for r in again] == [24, 20]
    naive.check(target(), requests, jobs)


@both_forms
@pytest.mark.parametrize("method", ["plain", "p-eagle"])
def test_of_a_prompt_that_is_given_up_the_launched_rows_are_known(
    method: str, static: bool
) -> None:
    net = None if method == "plain" else network(method)
    job = Job([n * 7 % VOCAB for n in range(40)], GREEDY)
    sequences = naive.known(target(), [job])
    options = {"max_num_batched_tokens": 10, "static": static}
    engine = engines.make_engine(target(), scripted(net, sequences), 4, **options)
    poison(engine)
    request = engine.add_request("0", job.prompt, job.params)
    engine.step()
    engine.step()
    engine.abort_request(request)
    assert check_known_blocks(engine, sequences, net) == 5  # of 20 rows
    (again,) = engines.run(engine, [job])
    assert again.num_cached_tokens == 20
    naive.check(target(), [again], [job])


@both_forms
def test_a_request_that_goes_on_without_drafts_has_no_more_known_blocks(static: bool) -> None:
    """Its drafts broke the target; the drafter does not read its rows from then on."""
    net, sequences = broken_head(poisoned()), naive.known(poisoned(), breaking_jobs())
    drafter = drafters.ScriptedHead(net, PoisonousScript(sequences))
    engine = engines.make_engine(poisoned(), drafter, 4, static=static)
    engines.run(engine, breaking_jobs())
    assert check_known_blocks(engine, sequences, net) > 0


def test_requests_that_come_together_compute_their_common_beginning_once() -> None:
    engine = engines.make_engine(target(), max_num_seqs=4)
    jobs = [Job([*range(20), n], dataclasses.replace(GREEDY, max_tokens=3)) for n in range(4)]
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert [r.num_cached_tokens for r in requests] == [0, 16, 16, 16]


def test_a_block_is_shared_only_where_the_token_behind_it_is_the_same() -> None:
    """The drafter's row of its last position depends on that token."""
    a, b = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    keys: list[list[bytes]] = [[], [], [], []]
    extend_keys(keys[0], a, 4, is_drafted=True)
    extend_keys(keys[1], b, 4, is_drafted=True)
    extend_keys(keys[2], a, 4, is_drafted=False)
    extend_keys(keys[3], [*a, 7, 8, 9], 4, is_drafted=True)
    assert keys[0] == keys[3]
    assert len({k for own in keys for k in own}) == 3
    extend_keys(keys[3], [*a, 7, 8, 9, 10], 4, is_drafted=True)
    assert len(keys[3]) == 2


def test_keys_do_not_depend_on_when_they_were_asked_for() -> None:
    tokens = [n * 7 % 40 for n in range(30)]
    at_once: list[bytes] = []
    extend_keys(at_once, tokens, 3, is_drafted=True)
    one_by_one: list[bytes] = []
    for n in range(31):
        extend_keys(one_by_one, tokens[:n], 3, is_drafted=True)
    assert one_by_one == at_once
    assert len(at_once) == 9


@pytest.mark.parametrize("depth", [1, 3])
def test_num_drafted_rows_is_a_lower_bound_for_any_steps(depth: int) -> None:
    """Against the rule itself: rows of a step that leaves no drafts are not drafted."""
    rng = random.Random(0)
    for _ in range(300):
        limit, reach = rng.randint(8, 30), rng.randint(6, 30)
        num_tokens = rng.randint(2, 6)
        drafted, has_hole = num_tokens - 1, False
        while num_tokens < limit:
            before, num_tokens = num_tokens, min(num_tokens + rng.randint(1, depth + 1), limit)
            numbers = [torch.tensor([x]) for x in (depth, num_tokens, limit, 1000)]
            has_hole |= int(draft_limit(*numbers, reach)) == 0
            drafted = drafted if has_hole else num_tokens - 1
            sure = num_drafted_rows(num_tokens, depth, limit, reach)
            assert max(drafted, before - 1) >= sure if not has_hole else drafted >= sure
            if not has_hole:
                assert sure == drafted


@both_forms
def test_a_preempted_request_comes_back_by_the_cache(static: bool) -> None:
    """The older one ends soon; of the younger's blocks only a few are taken meanwhile."""
    options = {"max_model_len": 60, "block_size": 2} | engines.room_for(76, target(), None)
    engine = engines.make_engine(target(), static=static, **options)
    jobs = [
        Job(prompts(2, seed=5)[0], dataclasses.replace(GREEDY, max_tokens=30)),
        Job([n % VOCAB for n in range(40)], GREEDY),
    ]
    computed = 0
    run = engine.runner.run

    def counted(shape: Any, slots: Any, caps: Any, chunks: Any, host: Any = None) -> Any:
        nonlocal computed
        computed += sum(c.num_rows for c in chunks if c.slot.request.request_id == "1")
        return run(shape, slots, caps, chunks, host)

    engine.runner.run = counted  # type: ignore[method-assign]
    requests = engines.run(engine, jobs)
    naive.check(target(), requests, jobs)
    assert requests[1].num_preemptions > 0
    assert computed < 39 + 20 * requests[1].num_preemptions


def test_without_it_nothing_is_kept() -> None:
    engine = engines.make_engine(target(), enable_prefix_caching=False)
    job = Job(list(range(20)), GREEDY)
    engines.run(engine, [job])
    (request,) = engines.run(engine, [job])
    naive.check(target(), [request], [job])
    assert request.num_cached_tokens == 0
    assert engine.prefix_cache_stats.queries == 0
    assert engine.allocator._prefixes.num_unused == 0


def test_a_conversation_says_how_much_was_cached(plain_llm: LLM, spec_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for llm in (plain_llm, spec_llm):
        prompt = llm.get_tokenizer().encode(f"the first turn of {llm.method}")
        first = llm.generate({"prompt_token_ids": prompt}, params)[0]
        assert first.num_cached_tokens < 16
        again = [*prompt, *first.outputs[0].token_ids, 5, 6]
        second = llm.generate({"prompt_token_ids": again}, params)[0]
        assert second.num_cached_tokens >= 32
        engine = llm.engine
        assert engine.prefix_cache_stats.hits >= 32

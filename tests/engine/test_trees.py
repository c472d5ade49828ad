"""Drafts that are trees: the answers are plain decoding's, whatever the trees hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.engine.engine import Speculation
from peagle.errors import ConfigError, RequestError
from peagle.models import p_eagle
from peagle.models.drafter import DraftBatch, Drafter
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.statistics import SpecDecodeStats
from peagle.speculation.trees import BEAM, Lattice
from tests.tiny import drafters, engines, naive
from tests.tiny.jobs import GREEDY, Job, prompts
from tests.tiny.models import SHALLOW, head_drafter

SAMPLED = [
    SamplingParams(seed=1, max_tokens=14),
    GREEDY,
    SamplingParams(seed=2, temperature=1.4, max_tokens=9),
    SamplingParams(seed=3, top_k=9, temperature=0.8, max_tokens=14),
    SamplingParams(seed=4, top_p=0.8, temperature=1.4, max_tokens=12),
    SamplingParams(seed=5, min_p=0.1, max_tokens=12),
]
HOST = [
    SamplingParams(temperature=0.0, max_tokens=14, repetition_penalty=1.6),
    SamplingParams(temperature=0.0, max_tokens=14, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(seed=1, max_tokens=14, logit_bias={3: 4.0, 7: -2.0}),
    SamplingParams(temperature=0.0, max_tokens=16, min_tokens=9, stop_token_ids=(4, 9, 17, 30)),
    SamplingParams(seed=6, max_tokens=14, logprobs=3),
]
BAD_WORDS = [[5], [1, 2], [7, 30, 11]]


@cache
def target() -> TargetModel:
    return SHALLOW.make_target()


@cache
def head() -> Drafter:
    return head_drafter(SHALLOW.make_head(target()))


@cache
def corrected() -> Drafter:
    return head_drafter(SHALLOW.make_head(target(), correction_size=20))


@cache
def eagle3() -> Drafter:
    return head_drafter(SHALLOW.make_head(target(), "eagle3", norm_output=True))


@cache
def windowed(method: str) -> Drafter:
    return head_drafter(SHALLOW.make_head(target(), method, sliding_window=8))


def all_drafters(jobs: list[Job]) -> list[Drafter]:
    """Trees out of one pass, right and wrong; of a beam, likewise; and of earlier matches."""
    one_pass = [scripted(jobs), head(), corrected(), windowed("p-eagle")]
    return [*one_pass, beam(jobs), eagle3(), windowed("eagle3"), NgramDrafter(1, 3)]


def beam(jobs: list[Job], ranks: tuple[int, ...] = (0, 1, 2, 7)) -> drafters.ScriptedBeam:
    network = SHALLOW.make_head(target(), "eagle3")
    return drafters.ScriptedBeam(network, naive.known(target(), jobs), ranks)


def scripted(jobs: list[Job], ranks: tuple[int, ...] = (0, 1, 2, 7)) -> drafters.ScriptedTrees:
    return drafters.ScriptedTrees(SHALLOW.make_head(target()), naive.known(target(), jobs), ranks)


def jobs_of(params: list[SamplingParams], count: int, seed: int = 1) -> list[Job]:
    texts = prompts(count, seed=seed)
    return [Job(p, params[n % len(params)], joins=n // 2) for n, p in enumerate(texts)]


@pytest.mark.slow
@pytest.mark.parametrize(("k", "nodes"), [(1, 1), (1, 8), (2, 5), (4, 3), (4, 12), (8, 30)])
def test_greedy_answers_are_plain_decodings(k: int, nodes: int) -> None:
    jobs = jobs_of([GREEDY], 3)
    for drafter in all_drafters(jobs):
        requests, _ = engines.run_both(target(), drafter, k, jobs, nodes=nodes)
        naive.check(target(), requests, jobs)


@pytest.mark.parametrize("params", [SAMPLED, HOST], ids=["sampled", "host"])
def test_with_every_sampling_parameter_answers_are_plain_decodings(
    params: list[SamplingParams],
) -> None:
    jobs = [
        job._replace(bad_word_ids=BAD_WORDS if params is HOST and n % 2 else ())
        for n, job in enumerate(jobs_of(params, 6))
    ]
    for drafter in all_drafters(jobs):
        requests, _ = engines.run_both(target(), drafter, 4, jobs, nodes=12)
        naive.check(target(), requests, jobs)


def test_logprobs_are_those_of_plain_decoding() -> None:
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=14, logprobs=4)) for p in prompts(3)]
    plain = engines.run(engines.make_engine(target()), jobs)
    requests, _ = engines.run_both(target(), scripted(jobs), 4, jobs, nodes=10)
    for ours, theirs in zip(requests, plain, strict=True):
        assert len(ours.logprobs) == len(theirs.logprobs) == 14
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (a.token_ids, a.ranks) == (b.token_ids, b.ranks)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    st.integers(0, 1000),
    st.integers(1, 6),
    st.integers(1, 20),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(40, 90),
    st.booleans(),
)
def test_any_trees_under_preemption_leave_the_answers_alone(
    seed: int, k: int, nodes: int, ranks: list[int], room: int, is_beam: bool
) -> None:
    jobs = jobs_of([GREEDY, SAMPLED[3]], 4, seed)
    drafter = (beam if is_beam else scripted)(jobs, tuple(ranks))
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 36}
    slack = Speculation(drafter, k, num_draft_nodes=min(nodes, 8)).cache_slack
    options |= engines.room_for(room + max(nodes, slack), target(), drafter)
    nodes = min(nodes, 8) if k == 1 else nodes
    for static in (False, True):
        engine = engines.make_engine(target(), drafter, k, nodes=nodes, static=static, **options)
        naive.check(target(), engines.run(engine, jobs), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [(4, None), (6, 6), (2, 3)])
def test_sliding_windows_see_the_path_and_not_its_siblings(
    windows: tuple[int | None, ...],
) -> None:
    """A path may be longer than the window, too."""
    model = SHALLOW.make_target(sliding_windows=windows)
    jobs = [Job(p, GREEDY) for p in prompts(3, seed=5)]
    for k, nodes, ranks in ((4, 12, (0, 1, 3)), (8, 20, (0,))):
        drafter = drafters.ScriptedTrees(SHALLOW.make_head(model), naive.known(model, jobs), ranks)
        requests, _ = engines.run_both(model, drafter, k, jobs, nodes=nodes)
        naive.check(model, requests, jobs)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_corrected_chains_leave_the_answers_alone(k: int) -> None:
    jobs = jobs_of([GREEDY, *SAMPLED], 6)
    requests, _ = engines.run_both(target(), corrected(), k, jobs)
    naive.check(target(), requests, jobs)


def test_by_rejection_drafts_are_drawn_without_the_correction() -> None:
    jobs = jobs_of(SAMPLED, 6)
    with_it, _ = engines.run_both(target(), corrected(), 4, jobs, verification="rejection")
    network = SHALLOW.make_head(target(), correction_size=20)
    network.correction = None
    without, _ = engines.run_both(
        target(), head_drafter(network), 4, jobs, verification="rejection"
    )
    assert engines.answers_of(with_it) == engines.answers_of(without)
    assert [r.stats.num_accepted_tokens for r in with_it] == [
        r.stats.num_accepted_tokens for r in without
    ]


def test_so_many_rows_that_it_would_not_pay_are_drafted_without_the_correction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = jobs_of([GREEDY], 6)
    network = SHALLOW.make_head(target(), correction_size=20)
    network.correction = None

    def accepted(drafter: Drafter) -> list[int]:
        requests, _ = engines.run_both(target(), drafter, 4, jobs, nodes=12)
        return [r.stats.num_accepted_tokens for r in requests]

    with_it, without = accepted(corrected()), accepted(head_drafter(network))
    assert with_it != without
    monkeypatch.setattr(p_eagle, "MAX_CORRECTED_ROWS", 2)  # of the three of a single request
    assert accepted(corrected()) == without


@pytest.mark.parametrize("make", [scripted, beam])
def test_a_tree_with_the_right_tokens_is_accepted_to_its_full_depth(
    make: Callable[..., Drafter],
) -> None:
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=41)) for p in prompts(2, seed=3)]
    drafter = make(jobs, (1,))  # never the best candidate
    [first, _], engine = engines.run_both(target(), drafter, 3, jobs, nodes=40)
    stats = first.stats
    assert stats.num_accepted_tokens_per_pos[:2] == [stats.num_drafts] * 2
    assert len(stats.num_draft_tokens_per_pos) == 3
    assert stats.mean_acceptance_length > 3.5
    assert stats.conditional_acceptance[:2] == [1.0, 1.0]
    chain, _ = engines.run_both(target(), drafter, 3, jobs)
    assert chain[0].stats.num_accepted_tokens < stats.num_accepted_tokens
    assert engine.stats.num_accepted_tokens_per_pos[0] > 0


def test_requests_have_trees_of_their_own_size() -> None:
    own = [0, 1, 5, None]
    jobs = [
        Job(p, SamplingParams(temperature=0.0, max_tokens=14, num_draft_nodes=n))
        for p, n in zip(prompts(4, seed=2), own, strict=True)
    ]
    for drafter in (scripted(jobs, (0,)), beam(jobs, (0,))):
        requests, engine = engines.run_both(target(), drafter, 4, jobs, nodes=9)
        naive.check(target(), requests, jobs)
    sizes = [r.stats.num_draft_tokens / max(r.stats.num_drafts, 1) for r in requests]
    assert sizes == pytest.approx([*own[:3], 9], abs=0.01)
    with pytest.raises(RequestError, match="num_draft_nodes=10 is more than the engine drafts"):
        engine.add_request("x", [1], SamplingParams(num_draft_nodes=10))


def test_requests_of_their_own_depth_stand_beside_each_other() -> None:
    own = [0, 1, 2, None]
    jobs = [
        Job(p, SamplingParams(temperature=0.0, max_tokens=14, num_speculative_tokens=k))
        for p, k in zip(prompts(4, seed=2), own, strict=True)
    ]
    for drafter in (scripted(jobs, (0,)), beam(jobs, (0,))):
        requests, engine = engines.run_both(target(), drafter, 4, jobs, nodes=9)
        naive.check(target(), requests, jobs)
    depths = [len([n for n in r.stats.num_accepted_tokens_per_pos if n]) for r in requests]
    assert depths == [0, 1, 2, 4]
    assert [len(r.stats.num_draft_tokens_per_pos) for r in requests] == depths
    total = SpecDecodeStats()
    for request in requests:
        total.merge(request.stats)
    assert engine.stats.num_draft_tokens_per_pos == total.num_draft_tokens_per_pos
    assert engine.stats.num_accepted_tokens_per_pos == total.num_accepted_tokens_per_pos


def test_a_request_may_ask_for_a_deeper_tree_than_the_engines() -> None:
    jobs = [
        Job(p, SamplingParams(temperature=0.0, max_tokens=30, num_speculative_tokens=k))
        for p, k in zip(prompts(3, seed=2), (9, None, 2), strict=True)
    ]
    requests, _ = engines.run_both(target(), scripted(jobs, (0,)), 3, jobs, nodes=20)
    naive.check(target(), requests, jobs)
    assert [len(r.stats.num_draft_tokens_per_pos) for r in requests] == [9, 3, 2]


@pytest.mark.parametrize("make", [scripted, beam])
def test_blocks_are_taken_for_all_rows_even_where_there_are_few(
    make: Callable[..., Drafter],
) -> None:
    jobs = [Job(p, GREEDY) for p in prompts(2, seed=4)]
    drafter, drafted = make(jobs, (1,)), []
    for slots in (8, 1):  # the cache has room for as many requests
        options = {"max_model_len": 40, "max_num_seqs": slots}
        requests, _ = engines.run_both(target(), drafter, 4, jobs, nodes=20, **options)
        drafted.append([r.stats.num_draft_tokens_per_pos for r in requests])
        drafted[-1].append([r.stats.num_draft_tokens for r in requests])
    assert drafted[0] == drafted[1]


def test_first_drafts_of_a_beam_are_as_deep_while_another_request_waits() -> None:
    """It waits for the blocks of a prompt that both begin with, so none are taken ahead."""
    params = SamplingParams(temperature=0.0, max_tokens=9)
    jobs = [Job([*range(1, 10), own], params) for own in (3, 4)]
    drafter, first_drafts = beam(jobs, (0,)), []
    for count in (1, 2):
        options = {"block_size": 1, "enable_prefix_caching": True}
        engine = engines.make_engine(target(), drafter, 8, nodes=12, **options)
        requests = [engine.add_request("", job.prompt, params) for job in jobs[:count]]
        engine.step()
        assert len(engine.scheduler.waiting) == count - 1
        requests[0].draft_trees = first_drafts
        engine.step()
    assert first_drafts[0] == first_drafts[1]


@pytest.mark.parametrize("static", [False, True])
def test_rows_of_a_beam_stay_within_the_blocks_of_their_request(static: bool) -> None:
    """And they find room up to the last step that drafts."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=12)) for p in prompts(3, seed=4)]
    drafter, seen = eagle3(), []
    lattice = drafter.lattice  # type: ignore[attr-defined]
    engine = engines.make_engine(target(), drafter, 8, nodes=9, static=static, max_model_len=40)

    def watch(batch: DraftBatch) -> Lattice | None:
        capacity = engine.runner.models.state.capacity[batch.slots]
        last = batch.starts + batch.num_real - 1 + (batch.num_drafts - 1) * BEAM
        drafts = batch.num_drafts > 0
        assert bool((last < capacity)[drafts].all())
        until_end = engine.runner.models.state.limits[batch.slots] - (
            batch.starts + batch.num_real + 2
        )
        assert torch.equal(batch.num_drafts[drafts], until_end.clamp(max=8)[drafts])
        seen.extend(batch.num_drafts[drafts].tolist())
        return lattice(batch)  # type: ignore[no-any-return]

    drafter.lattice = watch  # type: ignore[attr-defined]
    try:
        naive.check(target(), engines.run(engine, jobs), jobs)
    finally:
        drafter.lattice = lattice  # type: ignore[attr-defined]
    assert set(seen) >= {1, 2, 8}


def test_a_beam_of_one_path_drafts_the_chain() -> None:
    jobs = jobs_of([GREEDY, SAMPLED[3]], 4)
    network = SHALLOW.make_head(target(), "eagle3")
    trees, _ = engines.run_both(target(), Eagle3Drafter(network, beam=1), 4, jobs, nodes=4)
    chains, _ = engines.run_both(target(), Eagle3Drafter(network), 4, jobs)
    for ours, theirs in zip(trees, chains, strict=True):
        assert ours.stats.num_accepted_tokens == theirs.stats.num_accepted_tokens
        assert ours.stats.num_steps == theirs.stats.num_steps


def test_float32_kernels_take_trees_and_give_plain_decodings_answers() -> None:
    model = SHALLOW.make_target(torch.float32)
    jobs = [Job(p, GREEDY) for p in prompts(4, seed=8)]
    drafter = drafters.ScriptedTrees(SHALLOW.make_head(model), naive.known(model, jobs), (0, 1, 3))
    plain = engines.run(engines.make_engine(model), jobs)
    requests = engines.run(engines.make_engine(model, drafter, 4, nodes=12), jobs)
    assert engines.answers_of(requests) == engines.answers_of(plain)
    assert sum(r.stats.num_accepted_tokens for r in requests) > 20


def test_a_path_that_ends_in_a_leaf_is_not_rejected() -> None:
    """Right tokens alone, in trees that are not as deep as they may be."""
    jobs = [Job(p, SamplingParams(temperature=0.0, max_tokens=25)) for p in prompts(2, seed=3)]
    requests, engine = engines.run_both(target(), scripted(jobs, (2,)), 6, jobs, nodes=12)
    total = SpecDecodeStats()
    for request in requests:
        total.merge(request.stats)
    assert total.num_reached_tokens_per_pos == engine.stats.num_reached_tokens_per_pos
    reached, accepted = total.num_reached_tokens_per_pos, total.num_accepted_tokens_per_pos
    assert 0 < total.num_accepted_tokens < 6 * total.num_drafts
    # Nothing was refused but what stood beside the right token at a depth that had it not.
    assert all(a <= r for a, r in zip(accepted, reached, strict=True))
    before = [total.num_drafts, *accepted[:-1]]
    assert any(r < b for r, b in zip(reached, before, strict=True))


def test_what_cannot_be_a_tree_is_refused() -> None:
    with pytest.raises(ConfigError, match="scripted cannot draft trees"):
        Speculation(drafters.random_drafts(), 4, num_draft_nodes=9)
    with pytest.raises(ConfigError, match="num_speculative_tokens=9 is more than") as caught:
        Speculation(eagle3(), 9, num_draft_nodes=9)
    assert caught.value.hint == "use at most 8"
    engine = engines.make_engine(target(), eagle3(), 4, nodes=9)
    with pytest.raises(RequestError, match="this eagle3 drafter can draft in trees"):
        engine.add_request("x", [1], SamplingParams(num_speculative_tokens=9))
    with pytest.raises(ConfigError, match="rejection verifies chains"):
        Speculation(head(), 4, "rejection", num_draft_nodes=9)
    with pytest.raises(ConfigError, match="more than a tree of depth 1") as caught:
        Speculation(head(), 1, num_draft_nodes=9)
    assert caught.value.hint == "use at most 8"
    with pytest.raises(ConfigError, match="more than a tree of depth 4"):
        Speculation(head(), 4, num_draft_nodes=64)


@engines.both_forms
@pytest.mark.parametrize("auto", [False, True])
def test_looked_at_trees_are_those_that_were_verified(static: bool, auto: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, seed=1)
    (job,) = jobs_of([params], 1)
    drafter = scripted([job], (0, 1, 2))
    engine = engines.make_engine(target(), drafter, k=4, nodes=12, static=static, auto=auto)
    prompt = list(job.prompt)
    request = engine.add_request("x", prompt, params)
    request.draft_trees = trees = []
    while engine.has_unfinished:
        engine.step()
    answer = naive.known(target(), [job])[0][len(prompt) :]
    assert len(trees) == engine.stats.num_drafts > 3
    assert sum(len(tree.token_ids) for tree in trees) == engine.stats.num_draft_tokens
    assert sum(len(tree.accepted) for tree in trees) >= engine.stats.num_accepted_tokens > 5
    for tree in trees:
        rows = [0, *tree.accepted]
        assert [tree.parents[node - 1] for node in tree.accepted] == rows[:-1]
        written = [tree.token_ids[node - 1] for node in tree.accepted]
        written.append(tree.bonus_token_id)
        rest = answer[tree.num_outputs :]
        assert rest[: len(written)] == written[: len(rest)]
        assert all(parent < node for node, parent in enumerate(tree.parents, start=1))


@engines.both_forms
@pytest.mark.parametrize("ends", ["stop", "preempted"])
def test_no_tree_is_kept_of_a_step_whose_tokens_are_not(static: bool, ends: str) -> None:
    """Collected late, it may be of a request that has ended or begins again."""
    jobs = jobs_of([SamplingParams(temperature=0.0, max_tokens=30)], 3)
    drafter, requests = scripted(jobs, (0, 1, 2)), []
    engine = engines.make_engine(target(), drafter, k=4, nodes=12, static=static)
    for job in jobs:
        answer, params = naive.answer(target(), job), job.params
        if ends == "stop":
            last = next(t for n, t in enumerate(answer) if n > 14 and t not in answer[:n])
            params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=(last,))
        requests.append(engine.add_request("", job.prompt, params))
    for request in requests:
        request.draft_trees = []
    while engine.has_unfinished:
        engine.step()
        slot, request = engine.scheduler.slot_of(requests[0]), requests[0]
        is_due = request.num_outputs > 9 and not request.num_preemptions
        if ends == "preempted" and slot and is_due:
            engine.scheduler._preempt(slot)
    for request in requests:
        trees = request.draft_trees
        assert trees is not None
        assert len(trees) == request.stats.num_drafts > 2
        assert sum(len(tree.token_ids) for tree in trees) == request.stats.num_draft_tokens
        starts = [tree.num_outputs for tree in trees]
        assert starts == sorted(set(starts))
        assert starts[-1] < request.num_outputs

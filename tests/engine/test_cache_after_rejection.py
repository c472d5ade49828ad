"""Claim 4: caches after rejections equal recomputation from the prefix; so do the drafts.

Lossless verification hides a drafter that is fed wrongly: it would only be accepted less often.
So here its cache, its inputs and its drafts are compared with passes over the whole prefix.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from peagle.engine.engine import Engine
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.scheduler import Slot
from peagle.kernels.device_batch import DeviceBatch
from peagle.kernels.reference.attention import PLAIN, Scores
from peagle.kernels.reference.sampling import SamplingMetadata
from peagle.kernels.reference.trees import top_tokens
from peagle.models.attention import MaskedAttention, causal_attention
from peagle.models.drafter import DraftBatch
from peagle.models.eagle import EagleNetwork
from peagle.models.rollouts import rollout_rows
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.node_budget import NodeBudget
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import SamplingRows, filter_logits, sample
from peagle.speculation.trees import BEAM
from tests.tiny import drafters, engines, naive
from tests.tiny.engines import both_forms
from tests.tiny.jobs import Job, prompts
from tests.tiny.models import SHALLOW, VOCAB, head_drafter
from tests.tolerance import rounding

TOLERANCE = {torch.float64: 1e-10, torch.float32: rounding(terms=48, depth=4)}
PROMPTS = prompts(4, seed=8, longest=24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=18)
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 2},
    "p-eagle, reduced vocabulary": {"draft_vocab_size": 15, "norm_before_residual": True},
    "eagle3": {"method": "eagle3"},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True, "has_lm_head": True},
    "p-eagle, few positions": {"max_position_embeddings": 24},
    "eagle3, few positions": {"method": "eagle3", "max_position_embeddings": 24},
}


class RecordingAttention(MaskedAttention):
    """Plain causal attention that remembers the keys and values of each layer."""

    def __init__(self, num_rows: int) -> None:
        positions = torch.arange(num_rows)
        super().__init__(causal_attention(positions).mask, positions)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        return super().__call__(layer, q, k, v, window, scores)


@cache
def target(dtype: torch.dtype = torch.float64) -> TargetModel:
    return SHALLOW.make_target(dtype)


def jobs() -> list[Job]:
    return [Job(p, GREEDY, joins=n) for n, p in enumerate(PROMPTS)]


def answer_of(answers: list[list[int]], slot: Slot) -> list[int]:
    prompt = slot.request.prompt_token_ids
    return next(a for a in answers if a[: len(prompt)] == prompt)


def num_cached(engine: Engine, slot: Slot) -> int:
    """Positions that the device has computed, of which the host may not know yet."""
    if engine.scheduler.batch.decodes[slot.index]:
        return int(engine.runner.models.state.num_computed[slot.index])
    return slot.num_prefilled


def check_caches(
    engine: Engine, network: EagleNetwork, slot: Slot, answer: list[int], tolerance: float
) -> None:
    models, n = engine.runner.models, num_cached(engine, slot)
    recorded = RecordingAttention(n)
    aux_hidden_states = engine.target(
        torch.tensor(answer[:n]),
        torch.arange(n),
        recorded,
        network.config.aux_hidden_state_layer_ids,
    ).aux_hidden_states
    check_cache(models.model.cache, slot, recorded, tolerance)
    is_decoding = engine.scheduler.batch.decodes[slot.index]
    if is_decoding and not models.state.num_drafts[slot.index]:
        return  # near its end, where nobody reads the drafter's cache again
    recorded = RecordingAttention(n)
    embeddings = network.embed(torch.tensor(answer[1 : n + 1]))
    assert aux_hidden_states is not None
    network(embeddings, network.features(aux_hidden_states), torch.arange(n), recorded)
    assert models.drafting is not None
    check_cache(models.drafting.model.cache, slot, recorded, tolerance)


def check_cache(
    cache: PagedKVCache, slot: Slot, recorded: RecordingAttention, tolerance: float
) -> None:
    table = slot.request.table
    assert table is not None
    places = [table.slot(p) for p in range(len(recorded.keys[0]))]
    for kept, made in ((cache.keys, recorded.keys), (cache.values, recorded.values)):
        torch.testing.assert_close(kept[:, places], torch.stack(made), rtol=0, atol=tolerance)


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["p-eagle", "eagle3", "eagle3, trees"])
def test_caches_equal_recomputation_after_every_step(
    name: str, dtype: torch.dtype, static: bool
) -> None:
    is_tree = name.endswith("trees")
    network = SHALLOW.make_head(target(dtype), **HEADS[name.removesuffix(", trees")])
    # Right drafts now and then, so that steps accept none, some and all.
    answers = naive.known(target(dtype), jobs())
    drafter = drafters.ScriptedHead(network, drafters.Script(answers, seed=2))
    if is_tree:
        drafter = drafters.ScriptedBeam(network, answers, (0, 1, 2, 8))
    options = {"max_num_batched_tokens": 24, "nodes": 7 if is_tree else None}
    engine = engines.make_engine(target(dtype), drafter, 5, static=static, **options)
    for n, job in enumerate(jobs()):
        engine.add_request(str(n), job.prompt, job.params)
    num_checked = num_prompting = 0
    while engine.has_unfinished:
        engine.step()
        for slot in engine.scheduler.running.values():
            if num_cached(engine, slot):
                answer = answer_of(answers, slot)
                check_caches(engine, network, slot, answer, TOLERANCE[dtype])
                num_checked += 1
                num_prompting += not engine.scheduler.batch.decodes[slot.index]
    assert num_checked > 20
    assert num_prompting > 0
    assert 0.1 < engine.stats.acceptance_rate < 0.9


def naive_drafts(
    model: TargetModel, network: EagleNetwork, job: Job, history: list[int], k: int
) -> list[int]:
    """Drafts from scratch: all rows in one causal pass, no cache."""
    layers = network.config.aux_hidden_state_layer_ids
    aux_hidden_states = naive.aux_hidden_states_of(model, history[:-1], layers)
    tokens = torch.tensor(history[1:])
    if network.config.method == "p-eagle":
        embeddings, features = rollout_rows(network, tokens, aux_hidden_states, k - 1)
        hidden = whole_pass(network, embeddings, features)
        return [choose(network, hidden[d - k], job, history, d) for d in range(k)]
    embeddings, features = network.embed(tokens), network.features(aux_hidden_states)
    drafts: list[int] = []
    while True:
        hidden = whole_pass(network, embeddings, features)
        drafts.append(choose(network, hidden[-1], job, history, len(drafts)))
        if len(drafts) == k:
            return drafts
        state = network.norm(hidden[-1:]) if network.config.norm_output else hidden[-1:]
        embeddings = torch.cat((embeddings, network.embed(torch.tensor(drafts[-1:]))))
        features = torch.cat((features, state))


def whole_pass(network: EagleNetwork, embeddings: Tensor, features: Tensor) -> Tensor:
    positions = torch.arange(len(embeddings))
    return network(embeddings, features, positions, causal_attention(positions))


def choose(network: EagleNetwork, hidden: Tensor, job: Job, history: list[int], depth: int) -> int:
    logits = network.logits(hidden[None])
    p = job.params
    if p.greedy:
        return int(network.target_ids[logits.argmax()])
    settings = ([p.temperature], [p.top_k], [p.top_p], [p.min_p])
    filtered = filter_logits(logits, SamplingRows(*map(torch.tensor, settings)))
    position = len(history) - len(job.prompt) + depth
    noise = gumbel_noise(torch.tensor([p.seed]), torch.tensor([position]), VOCAB)
    return int(network.target_ids[sample(filtered, noise[:, network.target_ids])])


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_equal_those_of_a_drafter_that_recomputes_everything(
    name: str, sampled: bool, static: bool
) -> None:
    network = SHALLOW.make_head(target(), **HEADS[name])
    modes = [
        SamplingParams(seed=n, temperature=0.8, top_p=0.9, max_tokens=12) if sampled else GREEDY
        for n in range(len(PROMPTS))
    ]
    asked = [Job(p, mode) for p, mode in zip(PROMPTS, modes, strict=True)]
    answers = naive.known(target(), asked)
    engine = engines.make_engine(
        target(),
        head_drafter(network),
        4,
        max_num_batched_tokens=14,
        block_size=2,
        static=static,
    )
    state = engine.runner.models.state
    for n, job in enumerate(asked):
        engine.add_request(str(n), job.prompt, job.params)
    num_checked = num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        for slot in engine.scheduler.running.values():
            count, length = int(state.num_drafts[slot.index]), num_cached(engine, slot) + 1
            if not count or (num_steps % 3 and count == 4):
                continue
            job = asked[int(slot.request.request_id)]
            history = answer_of(answers, slot)[:length]
            in_reach = network.config.max_position_embeddings + 2 - length
            until_end = len(job.prompt) + slot.request.max_tokens - length - 1
            assert count == min(4, until_end, in_reach)
            drafts = state.drafts[slot.index, :count].tolist()
            assert drafts == naive_drafts(target(), network, job, history, count)
            num_checked += 1
    assert num_checked > 8


class Path(NamedTuple):
    tokens: tuple[int, ...]
    score: float
    embeddings: Tensor  # of all rows that lead to it
    features: Tensor


def naive_tree(
    model: TargetModel, network: EagleNetwork, job: Job, history: list[int], depth: int
) -> list[Path]:
    """EAGLE-3's beam, each path by passes of its own over all its rows; the best paths first."""
    layers = network.config.aux_hidden_state_layer_ids
    aux_hidden_states = naive.aux_hidden_states_of(model, history[:-1], layers)
    rows = network.embed(torch.tensor(history[1:])), network.features(aux_hidden_states)
    beam, pool = [Path((), 0.0, *rows)], list[Path]()
    for level in range(depth):
        found = [new for path in beam for new in continuations(network, path, job, history, level)]
        beam = sorted(found, key=lambda path: -path.score)[:BEAM]
        pool += found
    return sorted(pool, key=lambda path: -path.score)


def continuations(
    network: EagleNetwork, path: Path, job: Job, history: list[int], depth: int
) -> list[Path]:
    hidden = whole_pass(network, path.embeddings, path.features)[-1:]
    p, metadata = job.params, None
    if not p.greedy:
        position = len(history) - len(job.prompt) + depth
        numbers = [p.temperature], [p.top_k], [p.top_p], [p.min_p], [p.seed], [position]
        metadata = SamplingMetadata(*map(torch.tensor, numbers))
    best = top_tokens(network.logits(hidden), metadata, network.target_ids, BEAM)
    state = network.norm(hidden) if network.config.norm_output else hidden
    return [
        Path(
            (*path.tokens, token),
            path.score + log_prob,
            torch.cat((path.embeddings, network.embed(torch.tensor([token])))),
            torch.cat((path.features, state)),
        )
        for token, log_prob in zip(
            best.token_ids[0].tolist(), best.log_probs[0].tolist(), strict=True
        )
    ]


def paths_of(state: DeviceBatch, slot: int, count: int) -> list[tuple[int, ...]]:
    assert state.trees is not None
    paths: list[tuple[int, ...]] = [()]
    rows = zip(state.drafts[slot].tolist(), state.trees.parents[slot].tolist(), strict=True)
    for token, parent in list(rows)[:count]:
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["eagle3, normed output", "eagle3, few positions"])
def test_trees_equal_those_of_a_beam_that_runs_every_path_by_itself(
    name: str, sampled: bool, static: bool
) -> None:
    network = SHALLOW.make_head(target(), **HEADS[name])
    mode = SamplingParams(seed=3, temperature=0.8, top_k=12, max_tokens=9) if sampled else GREEDY
    asked = [Job(p, mode) for p in PROMPTS[:3]]
    answers = naive.known(target(), asked)
    options = {"max_num_batched_tokens": 40, "block_size": 2, "nodes": 20}
    engine = engines.make_engine(
        target(), head_drafter(network), 3, static=static, auto=True, **options
    )
    if isinstance(engine.budget, NodeBudget):  # all have drafts, as deep as can be
        engine.budget._depth_cost = 0.0
        engine.budget._share = lambda *_, **__: 1.0  # type: ignore[method-assign]
        engine.budget.gain = lambda *_, **__: 2.0  # type: ignore[method-assign]
    state = engine.runner.models.state
    for n, job in enumerate(asked):
        engine.add_request(str(n), job.prompt, job.params)
    checked, num_steps = set[int](), 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        for slot in engine.scheduler.running.values():
            count, length = int(state.num_drafts[slot.index]), num_cached(engine, slot) + 1
            job = asked[int(slot.request.request_id)]
            in_reach = network.config.max_position_embeddings + 2 - length
            depth = min(3, len(job.prompt) + slot.request.max_tokens - length - 1, in_reach)
            if not count or (num_steps % 3 and depth == 3):
                continue
            best = naive_tree(target(), network, job, answer_of(answers, slot)[:length], depth)
            best = [path for path in best if path.score > -torch.inf][:20]
            assert paths_of(state, slot.index, count) == [path.tokens for path in best]
            if state.draft_scores is not None:
                kept = state.draft_scores[slot.index, :count].tolist()
                assert kept == pytest.approx([path.score for path in best], abs=1e-5)
            checked.add(depth)
    assert checked == {1, 2, 3}


class RowCheck(drafters.ScriptedHead):
    """Asserts that the head sees every row once, in order, with its token and aux hidden states."""

    def __init__(self, network: EagleNetwork, answers: list[list[int]]) -> None:
        super().__init__(network, drafters.Script(answers, seed=1))
        self.num_seen: dict[Slot, int] = {}
        self.rows = 0

    def propose(self, batch: DraftBatch) -> Tensor:
        if batch.prompt is not None:
            items = batch.prompt.items
            tokens = batch.prompt.tokens.view(-1, items.rows_per_item)
            self._check(
                items.slots, items.starts, items.counts, tokens, batch.prompt.aux_hidden_states
            )
        self._check(
            batch.slots, batch.starts, batch.num_real, batch.tokens, batch.aux_hidden_states
        )
        return super().propose(batch)

    def _check(
        self,
        slots: Tensor,
        starts: Tensor,
        counts: Tensor,
        tokens: Tensor,
        aux_hidden_states: Tensor,
    ) -> None:
        assert self.engine is not None
        aux_hidden_states = aux_hidden_states.view(*tokens.shape, aux_hidden_states.shape[1])
        columns = (slots.tolist(), starts.tolist(), counts.tolist())
        for item, (index, start, count) in enumerate(zip(*columns, strict=True)):
            if not count:
                continue
            slot, end = self.engine.scheduler.running[index], start + count
            answer = answer_of(self.script.answers, slot)
            assert start == self.num_seen.get(slot, 0)
            assert tokens[item, :count].tolist() == answer[start + 1 : end + 1]
            expected = naive.aux_hidden_states_of(
                self.engine.target, answer[:end], self.aux_hidden_state_layers
            )
            torch.testing.assert_close(
                aux_hidden_states[item, :count], expected[start:], rtol=0, atol=1e-10
            )
            self.num_seen[slot] = end
            self.rows += count


@pytest.mark.slow
@both_forms
@pytest.mark.parametrize("budget", [3, 8, 64])
@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_the_head_sees_each_row_once_with_its_token_and_aux_hidden_states(
    name: str, budget: int, static: bool
) -> None:
    answers = naive.known(target(), jobs())
    drafter = RowCheck(SHALLOW.make_head(target(), **HEADS[name]), answers)
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 3, "block_size": 3}
    engine = engines.make_engine(target(), drafter, 5, static=static, **options)
    naive.check(target(), engines.run(engine, jobs()), jobs())
    assert drafter.rows > 60

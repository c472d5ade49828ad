"""Claim 4: caches after rejections equal recomputation from the prefix; so do the drafts.

Lossless verification hides a drafter that is fed wrongly: it would only be accepted less often.
So here its cache, its inputs and its drafts are compared with passes over the whole prefix.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tolerance import rounding
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.request import Request
from peagle.models.attention import MaskedAttention, causal_attention
from peagle.models.drafter import DraftBatch, Drafter, SequenceDraft
from peagle.models.eagle import EagleNetwork
from peagle.models.rollouts import rollout_rows
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import SamplingRows, filter_logits, sample

from . import tiny
from .tiny import Job

TOLERANCE = {torch.float64: 1e-10, torch.float32: rounding(terms=48, depth=4)}
PROMPTS = tiny.prompts(4, seed=8, longest=24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=18)
HEADS: dict[str, dict[str, Any]] = {
    "p-eagle": {"num_hidden_layers": 2},
    "p-eagle, reduced vocabulary": {"draft_vocab_size": 15, "norm_before_residual": True},
    "eagle3": {"method": "eagle3"},
    "eagle3, normed output": {"method": "eagle3", "norm_output": True, "has_lm_head": True},
}


class RecordingAttention(MaskedAttention):
    """Plain causal attention that remembers the keys and values of each layer."""

    def __init__(self, num_rows: int) -> None:
        positions = torch.arange(num_rows)
        super().__init__(causal_attention(positions).mask, positions)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        return super().__call__(layer, q, k, v, window)


@cache
def target(dtype: torch.dtype = torch.float64) -> TargetModel:
    return tiny.make_target(dtype)


def cached(cache: PagedKVCache, table: BlockTable, length: int) -> tuple[Tensor, Tensor]:
    slots = [table.slot(p) for p in range(length)]
    return cache.keys[:, slots], cache.values[:, slots]


def check_target_cache(engine: Engine, request: Request, tolerance: float) -> None:
    n = request.num_computed
    recorded = RecordingAttention(n)
    engine.target(torch.tensor(request.token_ids[:n]), torch.arange(n), recorded)
    compare(cached(engine.runner.target_cache, table_of(request), n), recorded, tolerance)


def check_draft_cache(
    engine: Engine, network: EagleNetwork, request: Request, tolerance: float
) -> None:
    n = request.draft_start
    if n == 0:
        return
    tokens = request.token_ids[: n + 1]
    taps = tiny.naive_taps(engine.target, tokens[:-1], network.config.aux_hidden_state_layer_ids)
    recorded = RecordingAttention(n)
    embeddings = network.embed(torch.tensor(tokens[1:]))
    network(embeddings, network.features(taps), torch.arange(n), recorded)
    assert engine.runner.draft_cache is not None
    compare(cached(engine.runner.draft_cache, table_of(request), n), recorded, tolerance)


def compare(kept: tuple[Tensor, Tensor], recorded: RecordingAttention, tolerance: float) -> None:
    for ours, theirs in zip(kept, (recorded.keys, recorded.values), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=tolerance)


def table_of(request: Request) -> BlockTable:
    assert request.table is not None
    return request.table


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["p-eagle", "eagle3"])
def test_caches_equal_recomputation_after_every_step(name: str, dtype: torch.dtype) -> None:
    network = tiny.make_head(target(dtype), **HEADS[name])
    jobs = [Job(p, GREEDY) for p in PROMPTS]
    # Right drafts now and then, so that steps accept none, some and all.
    drafter = Blend(network, tiny.mixed(known(dtype), seed=2))
    engine = tiny.make_engine(target(dtype), drafter, 5, max_num_batched_tokens=24)
    requests = [engine.add_request(str(n), j.prompt, j.params) for n, j in enumerate(jobs)]
    fed = 0
    while engine.has_unfinished:
        engine.step()
        for request in requests:
            if request.table is not None:
                check_target_cache(engine, request, TOLERANCE[dtype])
                check_draft_cache(engine, network, request, TOLERANCE[dtype])
                fed = max(fed, request.draft_start)
    assert fed > 20
    assert 0.1 < engine.stats.acceptance_rate < 0.9


def known(dtype: torch.dtype) -> list[list[int]]:
    return [p + tiny.naive(target(dtype), Job(p, GREEDY)) for p in PROMPTS]


class Blend:
    """Runs a head, so that its cache is used, but drafts what a script says."""

    method = "blend"
    max_speculative_tokens = 16

    def __init__(self, network: EagleNetwork, script: tiny.ScriptedDrafter) -> None:
        self.head = tiny.head_drafter(network)
        self.tap_layers = self.head.tap_layers
        self.cache_layout = self.head.cache_layout
        self.max_positions = self.head.max_positions
        self.script = script

    def propose(self, batch: DraftBatch) -> list[SequenceDraft]:
        self.head.propose(batch)
        return self.script.propose(batch)


class Recorder:
    """Passes everything on, and remembers what went in and what came out."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.method = drafter.method
        self.tap_layers = drafter.tap_layers
        self.cache_layout = drafter.cache_layout
        self.max_speculative_tokens = drafter.max_speculative_tokens
        self.max_positions = drafter.max_positions
        self.seen: list[tuple[list[int], list[int]]] = []  # history, drafts
        self.wanted: list[int] = []

    def propose(self, batch: DraftBatch) -> list[SequenceDraft]:
        drafts = self.drafter.propose(batch)
        for sequence, draft in zip(batch.sequences, drafts, strict=True):
            if sequence.num_draft_tokens:
                self.seen.append((list(sequence.history), draft.token_ids))
                self.wanted.append(sequence.num_draft_tokens)
        return drafts


def naive_drafts(
    model: TargetModel, network: EagleNetwork, job: Job, history: list[int], k: int
) -> list[int]:
    """Drafts from scratch: all rows in one causal pass, no cache."""
    layers = network.config.aux_hidden_state_layer_ids
    taps = tiny.naive_taps(model, history[:-1], layers)
    tokens = torch.tensor(history[1:])
    if network.config.method == "p-eagle":
        embeddings, features = rollout_rows(network, tokens, taps, k - 1)
        hidden = whole_pass(network, embeddings, features)
        return [choose(network, hidden[d - k], job, history, d) for d in range(k)]
    embeddings, features = network.embed(tokens), network.features(taps)
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
    noise = gumbel_noise(torch.tensor([p.seed]), torch.tensor([position]), tiny.VOCAB)
    return int(network.target_ids[sample(filtered, noise[:, network.target_ids])])


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_equal_those_of_a_drafter_that_recomputes_everything(
    name: str, sampled: bool
) -> None:
    network = tiny.make_head(target(), **HEADS[name])
    modes = [
        SamplingParams(seed=n, temperature=0.8, top_p=0.9, max_tokens=12) if sampled else GREEDY
        for n in range(len(PROMPTS))
    ]
    jobs = [Job(p, mode) for p, mode in zip(PROMPTS, modes, strict=True)]
    recorder = Recorder(tiny.head_drafter(network))
    engine = tiny.make_engine(target(), recorder, 4, max_num_batched_tokens=14, block_size=2)
    tiny.run(engine, jobs)
    assert len(recorder.seen) > 20
    for (history, drafts), wanted in list(zip(recorder.seen, recorder.wanted, strict=True))[::3]:
        job = next(j for j in jobs if history[: len(j.prompt)] == j.prompt)
        assert len(drafts) == wanted
        assert drafts == naive_drafts(target(), network, job, history, wanted)


class TapCheck(tiny.ScriptedDrafter):
    """Asserts that it sees every row once, in order, with the right token and the right taps."""

    def __init__(self, model: TargetModel, script: tiny.ScriptedDrafter) -> None:
        super().__init__(script.script, tap_layers=(2, 0))
        self.model = model
        self.rows = 0

    def propose(self, batch: DraftBatch) -> list[SequenceDraft]:
        for s in batch.sequences:
            assert s.taps is not None
            end = s.start + len(s.taps)
            assert s.token_ids.tolist() == list(s.history[s.start + 1 : end + 1])
            if s.num_draft_tokens:
                assert end == len(s.history) - 1  # nothing is left behind
            expected = tiny.naive_taps(self.model, s.history[:end], self.tap_layers)
            torch.testing.assert_close(s.taps, expected[s.start :], rtol=0, atol=1e-10)
            self.rows += len(s.taps)
        return super().propose(batch)


@pytest.mark.parametrize("budget", [3, 8, 64])
def test_the_drafter_sees_each_row_once_with_its_token_and_taps(budget: int) -> None:
    drafter = TapCheck(target(), tiny.mixed(known(torch.float64)))
    engine = tiny.make_engine(
        target(), drafter, 5, max_num_batched_tokens=budget, max_num_seqs=3, block_size=3
    )
    requests = tiny.run(engine, [Job(p, GREEDY, joins=n) for n, p in enumerate(PROMPTS)])
    assert tiny.answers_of(requests) == [
        k[len(p) :] for k, p in zip(known(torch.float64), PROMPTS, strict=True)
    ]
    assert drafter.rows > 60


def test_a_long_prompt_goes_to_the_drafter_as_its_chunks_come() -> None:
    """Not all at once at the end: the taps of a long prompt would fill memory until then."""
    engine = tiny.make_engine(
        target(),
        tiny.head_drafter(tiny.make_head(target())),
        max_num_batched_tokens=8,
        max_num_seqs=2,
    )
    request = engine.add_request("0", [n % tiny.VOCAB for n in range(50)], GREEDY)
    while request.num_outputs == 0:
        engine.step()
        assert request.num_pending <= 8
    assert request.draft_start == 48

"""Tiny targets, heads and drafters of known behaviour, and a slow answer to compare with.

`naive` is the oracle of these tests: it shares with the engine the model and the definition of
the noise, and nothing else. It recomputes the whole prefix for every token.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from peagle.config import EngineConfig, Verification
from peagle.engine.engine import Engine, Speculation
from peagle.engine.host_sampling import HostSampling
from peagle.engine.kv_cache import slot_bytes, target_layout
from peagle.engine.request import Request
from peagle.engine.runner import Report, Runner
from peagle.engine.scheduler import Chunk, Slot
from peagle.engine.step import StepShape
from peagle.models.attention import causal_attention
from peagle.models.config import DecoderConfig
from peagle.models.drafter import (
    CacheLayout,
    DraftBatch,
    Drafter,
    NetworkDrafter,
    Packing,
    SequenceDraft,
)
from peagle.models.eagle import EagleNetwork, initialise, shared_tables
from peagle.models.eagle3 import Eagle3Drafter
from peagle.models.head_config import HeadConfig
from peagle.models.output import OutputRows
from peagle.models.p_eagle import PEagleDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import SamplingRows, filter_logits, probabilities, sample
from peagle.speculation.trees import BEAM

VOCAB = 40
CONTEXT = 96
HIDDEN = 32
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

# Exact: rows and collection as on a CPU. Static: padded shapes, collected one step late, as on a
# GPU.
both_forms = pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])


def llama_config(**changes: Any) -> LlamaConfig:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": ROPE,
    }
    return LlamaConfig(**fields | changes)


def make_target(
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sliding_windows: tuple[int | None, ...] = (),
    **changes: Any,
) -> TargetModel:
    config = DecoderConfig.from_transformers(llama_config(**changes))
    object.__setattr__(config, "sliding_windows", sliding_windows)
    model = TargetModel(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.dim() == 2:  # large enough that answers differ and do not fall into a loop
            torch.nn.init.normal_(weight, 0.0, 0.3, generator=generator)
    return model.requires_grad_(False).eval()


def make_head(
    target: TargetModel, method: str = "p-eagle", seed: int = 0, **changes: Any
) -> EagleNetwork:
    fields: dict[str, Any] = {
        "method": method,
        "target_model": "tiny",
        "target_hidden_size": target.config.hidden_size,
        "target_num_hidden_layers": target.config.num_hidden_layers,
        "vocab_size": target.config.vocab_size,
        "aux_hidden_state_layer_ids": (0, 1, 2),
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": target.config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPE,
        "draft_vocab_size": target.config.vocab_size,
        "max_speculative_tokens": 16,
        "num_speculative_tokens": 4,
    }
    network = EagleNetwork(HeadConfig(**fields | changes), shared_tables(target))
    network.to(target.embed_tokens.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    if network.config.reduced_vocabulary:
        every = torch.randperm(target.config.vocab_size, generator=generator)
        network.target_ids = every[: network.config.draft_vocab_size].sort().values
    initialise(network, target, generator)
    with torch.no_grad():  # larger than a training start, so that mistakes show
        for weight in network.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return network.requires_grad_(False)


def head_drafter(network: EagleNetwork) -> Drafter:
    if network.config.method == "p-eagle":
        return PEagleDrafter(network)
    return Eagle3Drafter(network)


class ScriptedDrafter:
    """Drafts what `script(history, k)` returns."""

    method = "scripted"
    cache_layout: CacheLayout | None = None
    max_speculative_tokens = 64
    max_positions: int | None = None

    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(self, script: Callable[[list[int], int], list[int]]) -> None:
        self.script = script

    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        asked = zip(histories, counts, strict=True)
        return [SequenceDraft(self.script(list(history), k)[:k]) for history, k in asked]


class TargetAsDrafter(ScriptedDrafter):
    """Draws from the target's own distribution, token by token, with the noise of the position:
    every draft must be accepted."""

    def __init__(self, target: TargetModel, jobs: Sequence[Job], *, keeps_probs: bool) -> None:
        self.target, self.jobs, self.keeps_probs = target, jobs, keeps_probs

    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        return [self._draft(list(h), k) for h, k in zip(histories, counts, strict=True)]

    def _draft(self, history: list[int], count: int) -> SequenceDraft:
        job = next(j for j in self.jobs if history[: len(j.prompt)] == j.prompt)
        tokens: list[int] = []
        probs = []
        for _ in range(count):
            logits = naive_logits(self.target, [*history, *tokens])[-1]
            position = len(history) + len(tokens) - len(job.prompt)
            tokens.append(_chosen(logits, job.params, position))
            probs.append(probabilities(_filtered(logits, job.params))[0])
        return SequenceDraft(tokens, torch.stack(probs) if probs and self.keeps_probs else None)


def oracle(answers: Sequence[Sequence[int]]) -> ScriptedDrafter:
    """Knows whole sequences, prompt included."""

    def script(history: list[int], k: int) -> list[int]:
        for answer in answers:
            if list(answer[: len(history)]) == history:
                return list(answer[len(history) : len(history) + k])
        return []

    return ScriptedDrafter(script)


def always_wrong(answers: Sequence[Sequence[int]]) -> ScriptedDrafter:
    knows = oracle(answers)
    return ScriptedDrafter(lambda h, k: [(t + 1) % VOCAB for t in knows.script(h, k)])


def random_drafts(seed: int = 0) -> ScriptedDrafter:
    rng = random.Random(seed)
    return ScriptedDrafter(lambda h, k: [rng.randrange(VOCAB) for _ in range(k)])


def mixed(answers: Sequence[Sequence[int]], seed: int = 0) -> ScriptedDrafter:
    """Right up to a depth that changes at every step, then anything; sometimes fewer drafts."""
    knows, rng = oracle(answers), random.Random(seed)

    def script(history: list[int], k: int) -> list[int]:
        right = knows.script(history, k)[: rng.randint(0, k)]
        return (right + [rng.randrange(VOCAB) for _ in range(k)])[: rng.randint(0, k)]

    return ScriptedDrafter(script)


def few(answers: Sequence[Sequence[int]], count: int) -> ScriptedDrafter:
    knows = oracle(answers)
    return ScriptedDrafter(lambda h, k: knows.script(h, k)[:count])


class Script:
    """Knows whole answers. How many drafts are right changes from position to position."""

    def __init__(self, answers: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.answers = [list(a) for a in answers]
        self.seed = seed

    def drafts(self, prompt: Sequence[int], num_tokens: int, k: int) -> list[int]:
        answer = next(a for a in self.answers if a[: len(prompt)] == list(prompt))
        right = random.Random(f"{self.seed} {num_tokens} {len(answer)}").choice((0, 1, 2, 4, 9))
        known = (answer[num_tokens:] + [0] * k)[:k]
        return [t if d < right else (t + 1) % VOCAB for d, t in enumerate(known)]


class ScriptedHead:
    """Runs a head inside the step, so that its cache is used, but drafts by the script."""

    method = "scripted head"

    def __init__(self, network: EagleNetwork, script: Script) -> None:
        self.head: NetworkDrafter = head_drafter(network)  # type: ignore[assignment]
        self.script = script
        self.aux_hidden_state_layers = self.head.aux_hidden_state_layers
        self.cache_layout = self.head.cache_layout
        self.max_positions = self.head.max_positions
        self.max_speculative_tokens = self.head.max_speculative_tokens
        self.engine: Engine | None = None  # make_engine says which

    def propose(self, batch: DraftBatch) -> Tensor:
        assert self.engine is not None
        drafts = self.head.propose(batch)
        num_tokens = (batch.starts + batch.num_real + 1).tolist()
        for row, (slot, count) in enumerate(
            zip(batch.slots.tolist(), batch.num_drafts.tolist(), strict=True)
        ):
            if count:
                prompt = self.engine.scheduler.running[slot].request.prompt_token_ids
                tokens = self.script.drafts(prompt, num_tokens[row], batch.depth)
                drafts[row] = torch.tensor(tokens)
        return drafts


class ScriptedTrees(ScriptedHead):
    """Knows whole answers; at each depth the right token is among the candidates, or not, at a
    place that changes from position to position. `ranks`: the places it may have."""

    def __init__(
        self, network: EagleNetwork, answers: Sequence[Sequence[int]], ranks: Sequence[int]
    ) -> None:
        super().__init__(network, Script(answers))
        self.ranks = ranks

    def lattice(self, batch: DraftBatch) -> tuple[OutputRows, Packing]:
        assert self.engine is not None
        output, packing = self.head.lattice(batch)  # type: ignore[attr-defined]
        logits = torch.full((len(batch.slots), batch.depth, VOCAB), -9.0, dtype=torch.float64)
        num_tokens = (batch.starts + batch.num_real + 1).tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            if int(batch.num_drafts[row]):
                prompt = self.engine.scheduler.running[slot].request.prompt_token_ids
                for depth in range(batch.depth):
                    tokens = self._candidates(prompt, num_tokens[row] + depth)
                    for rank, token in enumerate(tokens):
                        logits[row, depth, token] = 2.0 - rank
        return output._replace(values=packing.take(logits.flatten(0, 1))), packing

    def _candidates(self, prompt: Sequence[int], position: int) -> list[int]:
        """Of the token at this position, the best first."""
        answer = next(a for a in self.script.answers if a[: len(prompt)] == list(prompt))
        right = answer[position] if position < len(answer) else 0
        rng = random.Random(f"{position} {len(answer)}")
        others = rng.sample([t for t in range(VOCAB) if t != right], BEAM)
        rank = rng.choice(self.ranks)
        return [*others[:rank], right, *others[rank:]]


class Job(NamedTuple):
    """A request and the step at which it joins."""

    prompt: list[int]
    params: SamplingParams
    joins: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()
    eos: tuple[int, ...] = ()


def make_engine(
    target: TargetModel,
    drafter: Drafter | None = None,
    k: int = 4,
    verification: Verification = "coupled",
    eos: Sequence[int] = (),
    *,
    static: bool = False,
    nodes: int | None = None,
    **options: Any,
) -> Engine:
    """`static`: padded shapes and collection one step late, as under CUDA graphs. Every step is
    watched: see WatchedRunner."""
    speculation = None if drafter is None else Speculation(drafter, k, verification, nodes)
    config = EngineConfig(**{"max_num_seqs": 8, "block_size": 4} | options)
    engine = Engine(
        target,
        config,
        eos_token_ids=eos,
        speculation=speculation,
        static_shapes=static,
        async_scheduling=static,
    )
    engine.runner.__class__ = WatchedRunner
    watched(engine).engine, watched(engine).shapes = engine, []
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engine
    return engine


class WatchedRunner(Runner):
    """Keeps the shapes, and asserts of each step that its rows have room, that the host's idea of
    the device is right, and that the padding slot never advances."""

    engine: Engine
    shapes: list[StepShape]

    def run(
        self,
        shape: StepShape,
        slots: Sequence[int],
        caps: Sequence[int],
        chunks: Sequence[Chunk],
        host: HostSampling | None = None,
    ) -> Report:
        self.shapes.append(self._padded(shape, chunks))
        for index in slots:
            self._check_slot(self.engine.scheduler.running[index])
        report = super().run(shape, slots, caps, chunks, host)
        state = self.models.state
        assert state.numbers[1:4, state.padding].tolist() == [0, 0, 0]  # computed, limit, prompt
        assert int(state.num_drafts[state.padding]) == 0
        computed, limits = state.num_computed[list(slots)], state.limits[list(slots)]
        assert bool(((computed < limits) | (limits == 0)).all())  # 0: it failed
        return report

    def _check_slot(self, slot: Slot) -> None:
        state, batch, table = self.models.state, self.engine.scheduler.batch, slot.request.table
        assert table is not None
        n = slot.index
        assert state.block_tables[n, : len(table.blocks)].tolist() == table.blocks
        assert int(state.capacity[n]) == table.capacity == batch.capacity[n]
        computed, limit = int(state.num_computed[n]), int(state.limits[n])
        assert batch.num_computed[n] <= computed <= batch.start()[n]
        if computed + 1 < limit:  # else it writes nothing
            assert computed < table.capacity


def watched(engine: Engine) -> WatchedRunner:
    assert isinstance(engine.runner, WatchedRunner)
    return engine.runner


def run(engine: Engine, jobs: Sequence[Job], max_steps: int = 2000) -> list[Request]:
    """Steps until all are done; the blocks must be back afterwards."""
    requests: dict[int, Request] = {}
    step = 0
    while len(requests) < len(jobs) or engine.has_unfinished:
        assert step < max_steps, "the engine makes no progress"
        for n, job in enumerate(jobs):
            if job.joins <= step and n not in requests:
                requests[n] = engine.add_request(
                    str(n), job.prompt, job.params, bad_word_ids=job.bad_word_ids
                )
        engine.step()
        engine.allocator.check([r.table for r in requests.values() if r.table is not None])
        step += 1
    assert is_idle(engine)
    return [requests[n] for n in range(len(jobs))]


def run_both(
    target: TargetModel,
    drafter: Drafter | None,
    k: int,
    jobs: Sequence[Job],
    verification: Verification = "coupled",
    **options: Any,
) -> tuple[list[Request], Engine]:
    """Runs the jobs in both forms: same tokens, endings and counters; -> the static one's."""
    engines = [
        make_engine(target, drafter, k, verification, static=static, **options)
        for static in (False, True)
    ]
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engines[0]
    exact = run(engines[0], jobs)
    if isinstance(drafter, ScriptedHead):
        drafter.engine = engines[1]
    static = run(engines[1], jobs)
    assert answers_of(static) == answers_of(exact)
    assert endings(static) == endings(exact)
    assert counters(static) == counters(exact)
    return static, engines[1]


def endings(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    return [(r.finish_reason, r.stop_reason, r.error) for r in requests]


def counters(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Everything that is counted, but no times."""
    return [
        {k: v for k, v in dataclasses.asdict(r.stats).items() if not k.endswith("_time")}
        for r in requests
    ]


def is_idle(engine: Engine) -> bool:
    """All blocks and slots are back."""
    scheduler = engine.scheduler
    return (
        not engine.has_unfinished
        and engine.allocator.num_free == engine.allocator.num_blocks
        and len(scheduler._free) == scheduler.max_num_seqs
        and not scheduler.running
        and not scheduler.batch.in_flight.any()
    )


def room_for(num_tokens: int, target: TargetModel, drafter: Drafter | None) -> dict[str, Any]:
    """Options of an engine whose caches hold that many tokens."""
    layouts = [target_layout(target)]
    if drafter is not None and drafter.cache_layout is not None:
        layouts.append(drafter.cache_layout)
    dtype = target.embed_tokens.weight.dtype
    return {"kv_cache_memory_bytes": num_tokens * sum(slot_bytes(x, dtype) for x in layouts)}


def check_naive(target: TargetModel, requests: Sequence[Request], jobs: Sequence[Job]) -> None:
    assert answers_of(requests) == [naive(target, j) for j in jobs]


def known(target: TargetModel, jobs: Sequence[Job]) -> list[list[int]]:
    """Whole sequences, as scripts want them."""
    return [j.prompt + naive(target, j) for j in jobs]


def answers_of(requests: Sequence[Request]) -> list[list[int]]:
    return [r.output_token_ids for r in requests]


def naive_logits(target: TargetModel, token_ids: Sequence[int]) -> Tensor:
    """[n, V], from scratch."""
    return _naive_logits(target, tuple(token_ids))


@lru_cache(maxsize=4000)  # many tests ask for the same answers
@torch.inference_mode()
def _naive_logits(target: TargetModel, token_ids: tuple[int, ...]) -> Tensor:
    positions = torch.arange(len(token_ids))
    hidden, _ = target(torch.tensor(token_ids), positions, causal_attention(positions))
    return target.logits(hidden)


def naive_aux_hidden_states(
    target: TargetModel, token_ids: Sequence[int], layers: tuple[int, ...]
) -> Tensor:
    positions = torch.arange(len(token_ids))
    aux_hidden_states = target(
        torch.tensor(token_ids), positions, causal_attention(positions), layers
    ).aux_hidden_states
    assert aux_hidden_states is not None
    return aux_hidden_states


def naive(target: TargetModel, job: Job, max_model_len: int = CONTEXT) -> list[int]:
    """The plain answer to a job, token by token, each from the whole prefix."""
    prompt, p = job.prompt, job.params
    room = max_model_len - len(prompt)
    ends = set(p.stop_token_ids) | (set() if p.ignore_eos else set(job.eos))
    said: list[int] = []
    while len(said) < (room if p.max_tokens is None else min(p.max_tokens, room)):
        logits = naive_logits(target, prompt + said)[-1]
        logits = _adjusted(logits, prompt, said, job, ends)
        said.append(_chosen(logits, p, len(said)))
        if said[-1] in ends:
            break
    return said


def _adjusted(
    logits: Tensor, prompt: list[int], said: list[int], job: Job, ends: set[int]
) -> Tensor:
    p = job.params
    values = logits.tolist()
    for *prefix, last in job.bad_word_ids:
        if not prefix or said[-len(prefix) :] == prefix:
            values[last] = -float("inf")
    for token in ends if len(said) < p.min_tokens else ():
        values[token] = -float("inf")
    for token, bias in p.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *said}:
        factor = p.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(said):
        values[token] -= p.presence_penalty + p.frequency_penalty * said.count(token)
    return torch.tensor(values, dtype=logits.dtype)


def _chosen(logits: Tensor, p: SamplingParams, position: int) -> int:
    if p.greedy:
        return int(logits.argmax())
    assert p.seed is not None
    noise = gumbel_noise(torch.tensor([p.seed]), torch.tensor([position]), len(logits))
    return int(sample(_filtered(logits, p), noise))


def _filtered(logits: Tensor, p: SamplingParams) -> Tensor:
    """[1, V]"""
    rows = SamplingRows(
        torch.tensor([p.temperature]),
        torch.tensor([max(p.top_k, 0)]),
        torch.tensor([p.top_p]),
        torch.tensor([p.min_p]),
    )
    return filter_logits(logits[None], rows)


def prompts(count: int, seed: int = 0, longest: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

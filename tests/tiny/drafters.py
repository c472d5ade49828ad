"""Drafters that follow a script, beside a step or inside it; and drafts without an engine."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import PagedKVCache
from peagle.engine.row_layouts import ExactLayout, PagedModel
from peagle.kernels.reference.trees import Candidates
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import (
    CacheLayout,
    DraftBatch,
    NetworkDrafter,
    Packing,
    SequenceDraft,
)
from peagle.models.eagle import EagleNetwork
from peagle.models.output import OutputRows
from peagle.models.target import TargetModel
from peagle.speculation.sampling import probabilities
from peagle.speculation.trees import BEAM, Lattice

from . import naive
from .jobs import Job
from .models import VOCAB, head_drafter


class ScriptedDrafter:
    """Drafts what `script(history, k)` returns."""

    method = "scripted"
    cache_layout: CacheLayout | None = None
    max_speculative_tokens = 64
    max_tree_depth = 0
    rows_per_depth = 1
    weights_per_row = weights_per_depth = 0
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
            logits = naive.logits_of(self.target, [*history, *tokens])[-1]
            position = len(history) + len(tokens) - len(job.prompt)
            tokens.append(naive.sampled_token(logits, job.params, position))
            probs.append(probabilities(naive.filtered(logits, job.params))[0])
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
        self.head = head_drafter(network)
        self.script = script
        self.aux_hidden_state_layers = self.head.aux_hidden_state_layers
        self.cache_layout = self.head.cache_layout
        self.max_positions = self.head.max_positions
        self.max_speculative_tokens = self.head.max_speculative_tokens
        self.max_tree_depth = self.head.max_tree_depth
        self.rows_per_depth = self.head.rows_per_depth
        self.weights_per_row = self.head.weights_per_row
        self.weights_per_depth = self.head.weights_per_depth
        self.engine: Engine | None = None  # make_engine says which

    def feed(self, batch: DraftBatch) -> None:
        self.head.feed(batch)

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

    def lattice(self, batch: DraftBatch) -> Lattice | None:
        assert self.engine is not None
        assert batch.candidates is not None
        output, packing = self.head.output(batch)  # type: ignore[attr-defined]
        if not len(packing):
            return None
        size = self.head.network.config.vocab_size  # type: ignore[attr-defined]
        logits = torch.full((len(batch.slots), batch.depth, size), -9.0, dtype=torch.float64)
        num_tokens = (batch.starts + batch.num_real + 1).tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            if int(batch.num_drafts[row]):
                prompt = self.engine.scheduler.running[slot].request.prompt_token_ids
                for depth in range(batch.depth):
                    tokens = self._candidates(prompt, num_tokens[row] + depth)
                    for rank, token in enumerate(tokens):
                        logits[row, depth, token] = 2.0 - rank
        values = packing.take(logits.flatten(0, 1))
        candidates = batch.candidates(output._replace(values=values), packing)
        log_probs = self.head._log_probs(batch, output, packing, candidates)  # type: ignore[attr-defined]
        return Lattice(candidates.token_ids, log_probs)

    def _candidates(self, prompt: Sequence[int], position: int) -> list[int]:
        """Of the token at this position, the best first."""
        answer = next(a for a in self.script.answers if a[: len(prompt)] == list(prompt))
        right = answer[position] if position < len(answer) else 0
        rng = random.Random(f"{position} {len(answer)}")
        others = rng.sample([t for t in range(VOCAB) if t != right], BEAM)
        rank = rng.choice(self.ranks)
        return [*others[:rank], right, *others[rank:]]


class ScriptedBeam(ScriptedTrees):
    """The same candidates behind every path of an EAGLE-3 head's beam, whose rows it runs."""

    def lattice(self, batch: DraftBatch) -> Lattice | None:
        assert self.engine is not None
        num_tokens = (batch.starts + batch.num_real + 1).tolist()
        asked = [
            self.engine.scheduler.running[slot].request.prompt_token_ids if count else None
            for slot, count in zip(batch.slots.tolist(), batch.num_drafts.tolist(), strict=True)
        ]

        def candidates(
            output: OutputRows, packing: Packing, depth: int | None = None, count: int = BEAM
        ) -> Candidates:
            assert depth is not None
            tokens = torch.zeros(len(asked), 1, count, dtype=torch.int64)
            for row, prompt in enumerate(asked):
                if prompt is not None:
                    own = self._candidates(prompt, num_tokens[row] + depth)[:count]
                    tokens[row, 0] = torch.tensor(own)
            log_probs = (2.0 - torch.arange(9)).log_softmax(0)[:count]
            shape = len(asked), packing.rows_per_item, count
            return Candidates(tokens.expand(shape), log_probs.expand(shape))

        scripted = dataclasses.replace(batch, candidates=candidates)
        return self.head.lattice(scripted)  # type: ignore[attr-defined, no-any-return]


def propose(
    drafter: NetworkDrafter,
    tokens: Tensor,
    aux_hidden_states: Tensor,
    k: int,
    sample: Callable[[OutputRows, int, Packing], Tensor],
) -> list[int]:
    """k drafts behind the tokens [n] of one sequence, of which [n - 1] have hidden states."""
    assert drafter.cache_layout is not None
    num_rows, block = len(tokens) - 1, BlockTable(len(tokens) + k, range(0))
    block.append(0)
    cache = PagedKVCache(
        drafter.cache_layout, block.capacity, aux_hidden_states.dtype, aux_hidden_states.device
    )
    model, layout = PagedModel(cache, block.capacity - 1), ExactLayout([block])
    batch = DraftBatch(
        slots=torch.tensor([0]),
        tokens=tokens[None, 1:],
        aux_hidden_states=aux_hidden_states[:num_rows],
        starts=torch.tensor([0]),
        num_real=torch.tensor([num_rows]),
        num_rows=torch.tensor([num_rows + k - 1]),
        num_drafts=torch.tensor([k]),
        depth=k,
        prompt=None,
        attend=lambda items: layout.rows(model, items, 1),
        pack=layout.pack,
        pack_depths=partial(layout.pack_depths, torch.tensor([k])),
        sample=sample,
        candidates=None,
        temperature=None,
        ops=step_ops(aux_hidden_states.device),
    )
    drafts: list[int] = drafter.propose(batch)[0].tolist()
    return drafts

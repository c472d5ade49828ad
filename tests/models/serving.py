"""Drives a drafter as the engine's steps do: a real paged cache, batches, partial acceptance."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.row_layouts import ExactLayout, PaddedLayout, PagedModel, RowLayout
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import DraftBatch, NetworkDrafter, Packing, PromptRows, RowItems, Rows
from peagle.models.output import OutputRows
from tests.tiny.caches import poisoned_cache, shuffled_tables

CPU = torch.device("cpu")
OPS = step_ops(CPU)
ROWS_PER_ITEM = 4  # of prompts, where shapes are padded
BLOCK_SIZE = 4


class Text(NamedTuple):
    tokens: Tensor  # [n]
    aux_hidden_states: Tensor  # [n, 3H]


class Served(NamedTuple):
    """One proposal for one text: `known` tokens were there, `logits` [k, Vd] came out."""

    text: int
    known: int
    logits: Tensor
    drafted: list[int]


def make_texts(lengths: Sequence[int], aux_size: int) -> list[Text]:
    generator = torch.Generator().manual_seed(7)
    return [
        Text(
            torch.randint(59, (n,), generator=generator),
            torch.randn(n, aux_size, generator=generator, dtype=torch.float64),
        )
        for n in lengths
    ]


class GreedySampler:
    """Picks the most likely token and keeps the logits of wanted drafts, by item and depth."""

    def __init__(self, num_drafts: Sequence[int], *, padded: bool) -> None:
        self.num_drafts, self.padded = num_drafts, padded
        self.seen: dict[tuple[int, int], Tensor] = {}

    def __call__(self, output: OutputRows, first: int, packing: Packing) -> Tensor:
        logits, count = output.logits(), packing.rows_per_item
        by_item = packing.put(logits).view(len(self.num_drafts), count, -1)
        asked = [(b, j) for b, k in enumerate(self.num_drafts) for j in range(count)]
        wanted = [(b, j) for b, j in asked if first + j < self.num_drafts[b]]
        assert len(logits) == (len(asked) if self.padded else len(wanted))
        for b, j in wanted:
            assert (b, first + j) not in self.seen
            self.seen[b, first + j] = by_item[b, j]
        best = by_item.argmax(-1)
        return best if output.ids is None else output.ids[best]


@dataclass
class Sequences:
    """Where each text stands."""

    known: list[int]  # tokens; at first those of the prompt
    unfed: list[int]  # of the prompt's rows but the newest token's, how many are left
    drafted: list[int]  # how many drafts the next step verifies


class Decode(NamedTuple):
    """A text whose newest token was computed in this step, and what it gave."""

    text: int
    start: int
    num_new: int
    num_drafts: int  # asked for


class Chunk(NamedTuple):
    text: int
    first: int
    length: int


class Server:
    """`padded`: as under CUDA graphs; otherwise rows that are not real are left out."""

    def __init__(
        self, drafter: NetworkDrafter, texts: Sequence[Text], max_k: int, seed: int, *, padded: bool
    ) -> None:
        self.drafter, self.texts, self.max_k, self.padded = drafter, texts, max_k, padded
        assert drafter.cache_layout is not None
        lengths = [len(t.tokens) + max_k for t in texts]
        tables, num_slots = shuffled_tables(lengths, BLOCK_SIZE, seed)
        assert drafter.max_positions is not None
        self.model = PagedModel(
            poisoned_cache(drafter.cache_layout, num_slots), drafter.max_positions - 1
        )
        self.layout = make_layout(tables, padded=padded)

    def propose(self, decodes: Sequence[Decode], chunks: Sequence[Chunk]) -> list[Served]:
        """One step's draft; -> a proposal for each text that asked for one."""
        num_drafts = [d.num_drafts for d in decodes]
        items = list(decodes)
        if self.padded:
            items.append(Decode(len(self.texts), 0, 0, 0))  # the padding slot
            num_drafts.append(0)
        sampler = GreedySampler(num_drafts, padded=self.padded)
        depth = self.layout.max_drafts(torch.tensor(num_drafts), self.max_k)
        prompt = self._prompt(chunks) if chunks or self.padded else None
        if not depth and prompt is None:
            return []
        drafts = self.drafter.propose(self._batch(items, max(depth, 1), prompt, sampler))
        out = []
        for n, (text, start, num_new, k) in enumerate(decodes):
            if k:
                logits = torch.stack([sampler.seen.pop((n, j)) for j in range(k)])
                out.append(Served(text, start + num_new + 1, logits, drafts[n, :k].tolist()))
        assert not sampler.seen
        return out

    def _batch(
        self,
        items: Sequence[Decode],
        depth: int,
        prompt: PromptRows | None,
        sampler: GreedySampler,
    ) -> DraftBatch:
        width = self.max_k + 1 if self.padded else max((d.num_new for d in items), default=1)
        tokens = torch.full((len(items), width), 3)  # behind rejected drafts
        aux_hidden_states = self._unread(len(items) * width)
        num_real = [d.num_new if d.num_drafts else 0 for d in items]
        for n, (item, count) in enumerate(zip(items, num_real, strict=True)):
            if count:
                text, rows = self.texts[item.text], slice(item.start, item.start + count)
                tokens[n, :count] = text.tokens[item.start + 1 : item.start + count + 1]
                aux_hidden_states[n * width : n * width + count] = text.aux_hidden_states[rows]
        return DraftBatch(
            slots=_column(d.text for d in items),
            tokens=tokens,
            aux_hidden_states=aux_hidden_states,
            starts=_column(d.start for d in items),
            num_real=_column(num_real),
            num_rows=_column(
                n + max(d.num_drafts - 1, 0) for n, d in zip(num_real, items, strict=True)
            ),
            num_drafts=(num_drafts := _column(d.num_drafts for d in items)),
            depth=depth,
            prompt=prompt,
            attend=self._attend,
            pack=self.layout.pack,
            pack_depths=partial(self.layout.pack_depths, num_drafts),
            sample=sampler,
            candidates=None,
            temperature=None,
            ops=OPS,
        )

    def _attend(self, items: Sequence[RowItems]) -> Rows:
        return self.layout.rows(self.model, items, 1)

    def _prompt(self, chunks: Sequence[Chunk]) -> PromptRows:
        size = ROWS_PER_ITEM if self.padded else max(chunk.length for chunk in chunks)
        parts = [
            Chunk(text, first + offset, min(size, length - offset))
            for text, first, length in chunks
            for offset in range(0, length, size)
        ]
        if self.padded:
            parts.append(Chunk(len(self.texts), 0, 0))
        tokens, aux_hidden_states = (
            torch.full((len(parts) * size,), 3),
            self._unread(len(parts) * size),
        )
        for n, (text, first, length) in enumerate(parts):
            if length:
                own = slice(n * size, n * size + length)
                tokens[own] = self.texts[text].tokens[first + 1 : first + length + 1]
                aux_hidden_states[own] = self.texts[text].aux_hidden_states[first : first + length]
        columns = (_column(column) for column in zip(*parts, strict=True))
        return PromptRows(tokens, aux_hidden_states, RowItems(*columns, size))

    def _unread(self, num_rows: int) -> Tensor:
        """NaN: a row that is not real must not reach one that is."""
        return torch.full(
            (num_rows, self.texts[0].aux_hidden_states.shape[1]), torch.nan, dtype=torch.float64
        )


def make_layout(tables: Sequence[BlockTable], *, padded: bool) -> RowLayout:
    if not padded:
        return ExactLayout(tables)
    width = max(len(table.blocks) for table in tables)
    rows = [table.blocks + [0] * (width - len(table.blocks)) for table in tables]
    block_tables = torch.tensor([[*rows, [0] * width]], dtype=torch.int32)  # the last is padding
    return PaddedLayout(OPS, block_tables, BLOCK_SIZE)


def _column(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def serve(
    drafter: NetworkDrafter,
    texts: Sequence[Text],
    max_k: int,
    seed: int = 0,
    *,
    padded: bool = False,
) -> list[Served]:
    """Reveals the texts step by step as if drafts were partly accepted; -> all proposals.

    Prompts come in chunks beside others' newest tokens, or their own; then each step gives 1 to
    k + 1 tokens. Sequences join late, differ in k, and some ask for no drafts at their end.
    """
    chance = random.Random(seed)
    server = Server(drafter, texts, max_k, seed, padded=padded)
    known = [chance.randint(1, len(t.tokens) // 2) for t in texts]
    at = Sequences(known, unfed=[n - 1 for n in known], drafted=[0] * len(texts))
    out: list[Served] = []
    while any(known < len(t.tokens) for known, t in zip(at.known, texts, strict=True)):
        decodes: list[Decode] = []
        chunks: list[Chunk] = []
        for n in chance.sample(range(len(texts)), len(texts)):
            if at.known[n] < len(texts[n].tokens) and chance.random() < 0.7:
                _schedule(n, texts[n], at, max_k, chance, decodes, chunks)
        out += server.propose(decodes, chunks)
    return out


def _schedule(
    n: int,
    text: Text,
    at: Sequences,
    max_k: int,
    chance: random.Random,
    decodes: list[Decode],
    chunks: list[Chunk],
) -> None:
    """What one text gives to a step: a chunk of its prompt, its newest token, or both."""
    start, left = at.known[n] - 1, at.unfed[n]
    if left:
        length = left if chance.random() < 0.5 else chance.randint(1, left)
        chunks.append(Chunk(n, start - left, length))
        at.unfed[n] -= length
        if length < left or chance.random() < 0.5:
            return
    num_new = min(chance.randint(0, at.drafted[n]) + 1, len(text.tokens) - at.known[n])
    at.known[n] += num_new
    is_over = at.known[n] == len(text.tokens)
    at.drafted[n] = chance.randint(0 if is_over else 1, max_k)
    decodes.append(Decode(n, start, num_new, at.drafted[n]))

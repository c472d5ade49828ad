"""The drafter seam: what is new since the last step goes in, draft tokens come out.

There are two kinds. A `NetworkDrafter` reads the target's aux hidden states
(`aux_hidden_state_layers`), keeps a cache (`cache_layout`) and runs inside the engine's step, on
the device and without asking the host. A `HostDrafter` has neither: it looks at the tokens so far,
on the host, between two steps.

Rows are laid out in items of one size, some of them padding. Under CUDA graphs shapes must not
depend on values, so padding is computed for nothing, less of it where items share rows; elsewhere a
`Packing` leaves it out.

Shapes: B slots, K draft tokens, P rows per slot whose token and hidden state are known, at most, C
aux width, N rows, I items, Q rows of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from peagle.kernels.device_batch import TreeRows
from peagle.kernels.reference.trees import Candidates, SharedRows
from peagle.kernels.step_ops import StepOps
from peagle.models.attention import Attention
from peagle.models.output import OutputRows
from peagle.speculation.trees import BEAM, Lattice


class Span(NamedTuple):
    """Rows of one sequence of the batch, from position `start` on: at consecutive positions, or a
    tree's (speculation/trees.py), of which the first may be in the cache already."""

    sequence: int
    start: int
    length: int
    # Of all rows of the tree but the first; None: each row follows the last.
    parents: Sequence[int] | None = None
    first_row: int = 0  # of the tree; `start` is where its row 0 stands


class CacheLayout(NamedTuple):
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = ()  # of the layers' attention; empty: none has one

    @property
    def row_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """Of one token's key and value in one layer."""
        return 2 * self.row_size * dtype.itemsize


class RowItems(NamedTuple):
    """Q rows for each slot of `slots`, `counts` of them real, at positions from `starts` on. Of a
    tree, rows `first_row` .. first_row + Q - 1; its row 0 stands at `starts`, and the rows before
    `first_row` are in the cache."""

    slots: Tensor  # [I]
    starts: Tensor  # [I]
    counts: Tensor  # [I]
    rows_per_item: int  # Q
    tree: TreeRows | None = None  # [I, ...] where the rows are not at consecutive positions
    first_row: int = 0
    shared: SharedRows | None = None  # which rows there are, where items have not all of theirs


class Packing:
    """Which of N padded rows are real; without an index all are kept. `is_shared`: items share
    rows, and nobody wants them padded again."""

    def __init__(
        self,
        total: int,
        index: Tensor | None = None,
        rows_per_item: int = 1,
        *,
        is_shared: bool = False,
    ) -> None:
        self.total, self.index, self.rows_per_item = total, index, rows_per_item
        self.is_shared = is_shared

    def __len__(self) -> int:
        return self.total if self.index is None else len(self.index)

    def take(self, padded: Tensor) -> Tensor:
        """[N, ...] -> the real rows."""
        return padded if self.index is None else padded.index_select(0, self.index)

    def put(self, real: Tensor) -> Tensor:
        """The real rows -> [N, ...], zeros between them."""
        if self.index is None:
            return real
        padded = real.new_zeros(self.total, *real.shape[1:])
        return padded.index_copy_(0, self.index, real)


def pack(counts: Sequence[int], rows_per_item: int, device: torch.device) -> Packing:
    """Items with so many real rows each."""
    total = len(counts) * rows_per_item
    if sum(counts) == total:
        return Packing(total, None, rows_per_item)
    rows = [i * rows_per_item + j for i, count in enumerate(counts) for j in range(count)]
    return Packing(total, torch.tensor(rows, dtype=torch.long, device=device), rows_per_item)


class Rows(NamedTuple):
    """The rows of one pass of a model."""

    attention: Attention
    positions: Tensor  # of the real rows
    packing: Packing


class PromptRows(NamedTuple):
    """Rows that only feed the drafter's cache."""

    tokens: Tensor  # [I * Q] the token at p + 1 for each row p
    aux_hidden_states: Tensor  # [I * Q, C] the target's hidden states at p
    items: RowItems


class CandidatesOf(Protocol):
    def __call__(
        self, output: OutputRows, packing: Packing, depth: int | None = None, count: int = BEAM
    ) -> Candidates:
        """[B, n, count]; `depth`: of the draft, from 0 on, that all n rows are for."""
        ...


@dataclass(frozen=True)
class DraftBatch:
    slots: Tensor  # [B]
    tokens: Tensor  # [B, P] the token at p + 1 for each new row p
    aux_hidden_states: Tensor  # [B * P, C] the target's hidden states at p
    starts: Tensor  # [B] position of the first new row
    num_real: Tensor  # [B] how many of the P rows there are
    num_rows: Tensor  # [B] these and a row for each draft but the first
    num_drafts: Tensor  # [B] how many drafts are asked for, K at most
    depth: int  # K
    prompt: PromptRows | None
    attend: Callable[[Sequence[RowItems]], Rows]
    pack: Callable[[Tensor, int], Packing]  # counts [I], rows per item
    pack_depths: Callable[[int, int], Packing]  # of drafts first .. first + count - 1
    # Rows of drafts first .. first + n - 1, packed -> tokens [B, n], in the target's ids.
    sample: Callable[[OutputRows, int, Packing], Tensor]
    # Rows of all drafts, or several of one, packed -> the best tokens of each, so many; None where
    # drafts must be `sample`d.
    candidates: CandidatesOf | None
    temperature: Tensor | None  # [B], 0 where greedy; None: all are
    ops: StepOps


class Drafter(Protocol):
    method: str
    aux_hidden_state_layers: tuple[int, ...]  # () when the target's hidden states are not needed
    cache_layout: CacheLayout | None  # None: a HostDrafter
    max_speculative_tokens: int
    max_positions: int | None  # drafts at or beyond this position are not asked for
    max_tree_depth: int  # 0: its drafts are chains
    rows_per_depth: int  # of the cache, that a tree's drafts leave behind the prefix
    weights_per_row: int  # that a row of known tokens is multiplied with
    weights_per_depth: int  # the same of all rows of a tree's depth, but the first


class NetworkDrafter(Drafter, Protocol):
    def propose(self, batch: DraftBatch) -> Tensor:
        """Draft tokens [B, K], in the target's ids; what stands beyond `num_drafts` is not read."""
        ...

    def feed(self, batch: DraftBatch) -> None:
        """Brings the cache up to date, and drafts nothing."""
        ...


class TreeDrafter(NetworkDrafter, Protocol):
    """A drafter whose candidates can become a tree."""

    def lattice(self, batch: DraftBatch) -> Lattice | None:
        """Of drafts 1 .. K; None where nobody asks for one."""
        ...


class SequenceDraft(NamedTuple):
    token_ids: list[int]  # at most as many as asked for, possibly none
    probabilities: Tensor | None = None  # [len(token_ids), V]; None: it is certain of them
    # Of a tree, as speculation/trees.py has them:
    parents: list[int] | None = None  # rows
    scores: list[float] | None = None  # log-probabilities of the nodes' paths


class HostDrafter(Drafter, Protocol):
    def propose(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[SequenceDraft]:
        """At most `counts` drafts behind all tokens of each sequence so far."""
        ...


class HostTreeDrafter(HostDrafter, Protocol):
    def propose_trees(
        self, histories: Sequence[Sequence[int]], counts: Sequence[int], depths: Sequence[int]
    ) -> list[SequenceDraft]:
        """At most `counts` nodes, at most `depths` behind each other."""
        ...

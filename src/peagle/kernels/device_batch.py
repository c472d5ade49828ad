"""What the device knows of the running requests: one slot each.

A step reads and writes this state without asking the host, so the host may be a step behind.
The last slot is padding: it fills batches up to a graph's size and never produces anything.

Shapes: L slots (padding included), G block tables of each, M entries of a table, D draft tokens at
most, V tokens, B slots of a step, K draft tokens of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TreeRows(NamedTuple):
    """How the drafts of slots hang together; speculation/trees.py. int64, X slots of some kind.
    Of a pass over a tree whose first rows are in the cache, depths and ancestors are its own rows'.
    """

    parents: Tensor  # [X, D]: rows
    depths: Tensor  # [X, D+1]: of rows, from the newest token's on
    ancestors: Tensor  # [X, D+1]: bit j of a row: it comes after row j, or is row j


class DeviceBatch(NamedTuple):
    # [COLUMNS, L] int64 and [FRACTIONS, L] float32: one write opens a slot; the columns are below.
    numbers: Tensor
    fractions: Tensor
    # [G, L, M] int32. Entries that a window has passed stay: no row reads them.
    block_tables: Tensor
    drafts: Tensor  # [L, D] draft tokens that the next step verifies
    trees: TreeRows | None  # [L, ...]; None where all drafts are chains
    draft_probs: Tensor | None  # [L, D, V] float32, what they were drawn from; only for rejection
    # [L, D] float32, log-probabilities of the nodes' paths; only where their number is chosen
    draft_scores: Tensor | None = None

    @property
    def last_tokens(self) -> Tensor:
        """[L] the newest token; the target has not computed it."""
        return self.numbers[0]

    @property
    def num_computed(self) -> Tensor:
        """[L] tokens before the newest: its position."""
        return self.numbers[1]

    @property
    def limits(self) -> Tensor:
        """[L] the request ends with that many tokens, prompt included; 0: ended."""
        return self.numbers[2]

    @property
    def num_prompt(self) -> Tensor:
        return self.numbers[3]

    @property
    def max_drafts(self) -> Tensor:
        """[L] drafts that the request may have per step; 0: it is not speculated for."""
        return self.numbers[4]

    @property
    def num_drafts(self) -> Tensor:
        """[L] how many of `drafts` there are."""
        return self.numbers[5]

    @property
    def top_k(self) -> Tensor:
        return self.numbers[6]

    @property
    def seeds(self) -> Tensor:
        return self.numbers[7]

    @property
    def capacity(self) -> Tensor:
        """[L] positions that the request's blocks hold."""
        return self.numbers[8]

    @property
    def max_depths(self) -> Tensor:
        """[L] drafts that may stand behind each other: `max_drafts`, unless these are a tree."""
        return self.numbers[9]

    @property
    def temperature(self) -> Tensor:
        """[L] 0: greedy."""
        return self.fractions[0]

    @property
    def top_p(self) -> Tensor:
        return self.fractions[1]

    @property
    def min_p(self) -> Tensor:
        return self.fractions[2]

    @property
    def padding(self) -> int:
        """The slot that is nobody's."""
        return self.numbers.shape[1] - 1


COLUMNS, FRACTIONS = 10, 3
HEADER = 3  # columns of a step's report before the tokens: num_new, num_drafts, failed


class StepCounts(NamedTuple):
    """Where each slot of a step stands as it begins; int64 [B] each but the last."""

    num_computed: Tensor
    num_drafts: Tensor  # how many drafts are verified in this step
    num_rows: Tensor  # these and the newest token; 0 where the request has ended
    num_outputs: Tensor  # tokens generated so far: the output position of the next one
    last_tokens: Tensor
    drafts: Tensor  # [B, K]
    tree: TreeRows | None = None  # [B, ...]

    def narrowed(self, num_drafts: int, *, is_tree: bool) -> StepCounts:
        """With room for so many drafts alone; `is_tree` False: they are a chain."""
        tree = self.tree if is_tree else None
        if tree is not None:
            size = num_drafts + 1
            tree = TreeRows(
                tree.parents[:, :num_drafts], tree.depths[:, :size], tree.ancestors[:, :size]
            )
        return self._replace(drafts=self.drafts[:, :num_drafts], tree=tree)


class Committed(NamedTuple):
    """What a step's verification left."""

    # [B, HEADER + K+1] int64: what the host reads. Of trees the K rows of their paths follow, where
    # slots share rows also how many drafts stand before each, and whether the path ends in a leaf.
    report: Tensor
    num_outputs: Tensor  # [B] tokens generated so far, the new ones included
    num_drafts: Tensor  # [B] drafts that are made for its next step, one behind the other
    num_real: Tensor  # [B] new tokens, whose rows the drafter reads; 0 where it never will draft
    num_rows: Tensor  # [B] these and a row for each draft but the first


class RowPlan(NamedTuple):
    """The parts of PagedRows that depend on where the slots stand; see kernels/rows.py."""

    tables: Tensor  # [B] int32
    starts: Tensor  # [B] int32
    ends: Tensor  # [B] int32
    positions: Tensor  # [B * Q] int64
    slots: Tensor  # [B * Q] int64


def make_device_batch(
    num_slots: int,
    max_blocks: int,
    max_drafts: int,
    device: torch.device,
    probs_shape: tuple[int, int] | None,
    *,
    num_tables: int = 1,
    has_trees: bool = False,
    keeps_scores: bool = False,
) -> DeviceBatch:
    """All slots ended, the padding among them. `probs_shape` (D, V): keep what drafts were drawn
    from."""
    size = num_slots + 1
    fractions = torch.zeros(FRACTIONS, size, dtype=torch.float32, device=device)
    fractions[1] = 1.0  # top_p
    probs = None
    if probs_shape is not None:
        probs = torch.empty(size, *probs_shape, dtype=torch.float32, device=device)
    return DeviceBatch(
        numbers=torch.zeros(COLUMNS, size, dtype=torch.int64, device=device),
        fractions=fractions,
        block_tables=torch.zeros(num_tables, size, max_blocks, dtype=torch.int32, device=device),
        drafts=torch.zeros(size, max_drafts, dtype=torch.int64, device=device),
        trees=_chains(size, max_drafts, device) if has_trees else None,
        draft_probs=probs,
        draft_scores=torch.zeros(size, max_drafts, device=device) if keeps_scores else None,
    )


def _chains(num_slots: int, max_drafts: int, device: torch.device) -> TreeRows:
    rows = torch.arange(max_drafts + 1, device=device)
    own = (rows[:-1], rows, (1 << (rows + 1)) - 1)
    return TreeRows(*(column.repeat(num_slots, 1) for column in own))

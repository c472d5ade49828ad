"""Trees of drafts in the state of a step's slots, as torch operations; speculation/trees.py.

Shapes: B slots of the step, N nodes, K depths, M candidates at each depth, R rows of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.device_batch import DeviceBatch, StepCounts
from peagle.kernels.reference.sampling import SamplingMetadata, sampling_scores
from peagle.speculation import trees


class Candidates(NamedTuple):
    """The best tokens of each row, in falling order."""

    token_ids: Tensor  # [R, M] the target's ids
    log_probs: Tensor  # [R, M] float32


class TreePath(NamedTuple):
    """What the target takes of a tree, as if it had been a chain."""

    drafts: Tensor  # [B, K]; -1 behind those that it takes
    sampled: Tensor  # [B, K+1] its choice at each of them
    usable: Tensor  # [B, K+1]
    rows: Tensor  # [B, K+1] where they stand
    num_accepted: Tensor  # [B]
    report: Tensor  # [B, ...] what the host reads of it; see kernels/device_batch.py: Committed


class SharedRows(NamedTuple):
    """Rows that the slots of a step have together, R of B * Q, where Q is what one has at most."""

    starts: Tensor  # [B + 1] int32: where each slot's begin
    places: Tensor  # [R] int64: where they stand among the B * Q, slot after slot
    ranks: Tensor  # [B, Q] int64: how many of all B * Q rows have a better claim than each


def top_tokens(
    logits: Tensor,
    metadata: SamplingMetadata | None,
    ids: Tensor | None,
    count: int,
    *,
    filters: bool = True,
) -> Candidates:
    """The `count` tokens that `sample_tokens` is most likely to find at the target's rows.

    Greedy: by probability. Sampled: with the noise of the position added, which the target's row
    has, too; what the noise prefers, both prefer. The log-probabilities are those of the scores.
    """
    scores = sampling_scores(logits, metadata, ids, filters=filters)  # [R, V]
    best = scores.topk(count, dim=-1)
    log_probs = best.values - scores.logsumexp(-1, keepdim=True)
    return Candidates(best.indices if ids is None else ids[best.indices], log_probs)


class BeamRows(NamedTuple):
    """Rows of one depth of a tree that is being drafted, one for each path of the beam."""

    scores: Tensor  # [B, M] float32
    token_ids: Tensor  # [B, M]
    paths: Tensor  # [B, M] which path of the depth before each goes on
    ancestors: Tensor  # [B, M] as TreeRows


def extend_beam(
    beam: BeamRows | None,  # the depth before, of W paths; None: W is 1
    token_ids: Tensor,  # [B, W, M] the candidates behind each path
    log_probs: Tensor,  # [B, W, M]
    parents: Tensor,  # [B, rows] as TreeRows; written
    first_row: int,  # of the new depth: the last one's stand before it
) -> BeamRows:
    """The M best of all continuations, as `grow_tree` finds them."""
    batch, width, size = token_ids.shape
    if beam is None:
        places = torch.arange(size, device=token_ids.device).expand(batch, size)
        scores = trees.usable_log_probs(log_probs[:, 0])
        before = torch.ones_like(places)
    else:
        sums = trees.continuations(beam.scores, trees.usable_log_probs(log_probs))
        scores, places = trees.best_continuations(sums, size)
        before = beam.ancestors.gather(1, places // size)
    paths = places // size
    rows = torch.arange(first_row, first_row + size, device=token_ids.device)
    parents[:, rows - 1] = 0 if beam is None else first_row - width + paths
    tokens = token_ids.flatten(1).gather(1, places)
    return BeamRows(scores, tokens, paths, before | (1 << rows))


def store_tree(
    state: DeviceBatch,
    slots: Tensor,  # [B]
    token_ids: Tensor,  # [B, K, M], by path [B, K, M, M]
    log_probs: Tensor,  # [B, K, M, M], see speculation/trees.py
    num_depths: Tensor,  # [B] how many of the K depths a slot drafts
    num_nodes: int,
) -> None:
    """The drafts of these slots' next step: the best nodes, at most as many as each may have."""
    assert state.trees is not None
    lattice = trees.limited(trees.Lattice(token_ids, log_probs), num_depths)
    tree = trees.grow_tree(*lattice, num_nodes)
    size = tree.token_ids.shape[1]  # few depths have fewer candidates
    state.drafts[slots, :size] = tree.token_ids
    state.trees.parents[slots, :size] = tree.parents
    state.trees.depths[slots, : size + 1] = trees.depths(tree.parents)
    state.trees.ancestors[slots, : size + 1] = trees.ancestors(tree.parents)
    if state.draft_scores is not None:
        state.draft_scores[slots, :size] = tree.scores.float()
    num_there = (tree.scores > -torch.inf).sum(1)
    state.num_drafts[slots] = torch.minimum(state.num_drafts[slots], num_there)


def share_rows(
    state: DeviceBatch,
    slots: Tensor,  # [B]
    counts: StepCounts,
    num_rows: int,  # R
) -> tuple[StepCounts, SharedRows]:
    """Every slot has a row for its newest token, and the most probable drafts of all slots have the
    others. What is left goes to no draft. -> with how many drafts each slot goes on."""
    assert state.draft_scores is not None
    batch, size = counts.drafts.shape
    node = torch.arange(size, device=slots.device)
    scores = state.draft_scores[slots, :size]
    scores = scores.masked_fill(node >= counts.num_drafts[:, None], -torch.inf)
    scores = torch.cat((torch.full_like(scores[:, :1], torch.inf), scores), dim=1).flatten()
    order = scores.sort(descending=True, stable=True).indices
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=slots.device)
    ranks = ranks.view(batch, size + 1)
    lengths = (ranks < num_rows).sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    is_given = torch.arange(size + 1, device=slots.device) < lengths[:, None]
    num_drafts = torch.minimum(counts.num_drafts, lengths - 1)
    counts = counts._replace(
        num_drafts=num_drafts, num_rows=torch.where(counts.num_rows > 0, num_drafts + 1, 0)
    )
    index = is_given.flatten().nonzero()[:, 0]
    return counts, SharedRows(starts.int(), index, ranks)


best_chain = trees.best_chain


def walk_tree(
    counts: StepCounts,
    sampled: Tensor,  # [B, N+1] of each row, [R] where slots share rows
    usable: Tensor,  # the same
    depth: int,
    shared: SharedRows | None = None,
) -> TreePath:
    assert counts.tree is not None
    if shared is not None:
        row = torch.arange(shared.ranks.shape[1], device=sampled.device)
        places = shared.starts[:-1, None] + row
        places = places.clamp(max=len(sampled) - 1)  # rows that a slot has not lie behind
        sampled, usable = sampled[places], usable[places]
    num_accepted, rows, is_leaf = trees.walk_tree(
        counts.drafts, counts.tree.parents, counts.num_drafts, sampled, depth
    )
    drafts = torch.full_like(rows[:, 1:], -1)
    if counts.drafts.shape[1]:
        drafts = counts.drafts.gather(1, (rows[:, 1:] - 1).clamp(min=0))
    is_taken = torch.arange(depth, device=rows.device) < num_accepted[:, None]
    report = [rows[:, 1:], is_leaf.long()[:, None]]
    if shared is not None:
        report.insert(1, shared.ranks.gather(1, rows[:, 1:]) - len(rows))
    return TreePath(
        torch.where(is_taken, drafts, -1),
        sampled.gather(1, rows),
        usable.gather(1, rows),
        rows,
        num_accepted,
        torch.cat(report, dim=1),
    )


def move_rows(
    keys: Tensor,  # [layers, S, g, D]
    values: Tensor,
    block_tables: Tensor,  # [L, M] int32
    slots: Tensor,  # [B]
    starts: Tensor,  # [B] position of row 0
    path: TreePath,
    block_size: int,
) -> None:
    """Brings the rows that were accepted to where a chain's would be."""
    depth = torch.arange(path.rows.shape[1], device=slots.device)
    moves = (depth <= path.num_accepted[:, None]) & (path.rows != depth)
    item, place = moves.nonzero(as_tuple=True)

    def cache_slots(positions: Tensor) -> Tensor:
        blocks = block_tables[slots[item], positions // block_size].long()
        return blocks * block_size + positions % block_size

    source = cache_slots(starts[item] + path.rows[item, place])
    destination = cache_slots(starts[item] + place)
    for cache in (keys, values):
        cache[:, destination] = cache[:, source]


def path_rows(
    x: Tensor, rows: Tensor, rows_per_slot: int, row_starts: Tensor | None = None
) -> Tensor:
    """x [B * Q, ...], [R, ...] where slots share rows -> the rows [B, n] of each  # [B * n, ...]"""
    first = torch.arange(len(rows), device=rows.device) * rows_per_slot
    if row_starts is not None:
        first = row_starts[:-1]
    return x[(first[:, None] + rows).flatten()]

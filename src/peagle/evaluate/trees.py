"""Acceptance of drafts that are trees, for every number of nodes at once.

Any first n nodes of a tree are the best tree of n nodes, so one tree of N nodes at an anchor tells
what each smaller one would have had accepted there: the nodes on the path that the text takes
through it, up to the n-th.

Shapes: n slots of a packed row, K depths, M candidates of each, A anchors, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.data.packing import PackedRow
from peagle.evaluate.beams import BeamLattices
from peagle.evaluate.contexts import ContextAcceptance, by_context
from peagle.evaluate.evaluator import Document, Evaluation, Evaluator, summed
from peagle.evaluate.replay import visited_steps
from peagle.kernels.cpu.linear import Weight
from peagle.kernels.reference.trees import Candidates
from peagle.models.eagle import EagleNetwork
from peagle.models.layers import at_least_float32, linear
from peagle.speculation.statistics import SpecDecodeStats
from peagle.speculation.trees import (
    BEAM,
    Lattice,
    Tree,
    depths,
    grow_tree,
    independent,
    limited,
    walk_tree,
)
from peagle.teacher_forcing.draft_model import DraftModel

ANCHORS_AT_ONCE = 128  # each is 8 rows of a beam, with scores for all that they see
NOT_WRITTEN = -1  # the text ends before


class DraftStates(NamedTuple):
    """States after the final norm at every anchor and depth, and the best tokens of each."""

    normed: Tensor  # [n, K, H]
    candidates: Candidates  # [n, K, M]


@dataclass(frozen=True)
class TreeEvaluation:
    acceptance: Evaluation  # one entry for each number of nodes
    by_context: ContextAcceptance  # with all of them


def evaluate_trees(evaluator: Evaluator, model: DraftModel, num_nodes: int) -> TreeEvaluation:
    """For each number of nodes up to N; depth K is the evaluator's."""

    def outcomes(row: PackedRow) -> Tensor:
        return _outcomes(evaluator, model, row, num_nodes)

    # An engine does not know where the text ends: drafts go beyond it.
    depth = evaluator.max_tokens
    documents = list(evaluator.documents_of(model, outcomes, room=depth + 1))
    counted = [(d.groups, list(_replays(d, depth))) for d in documents]
    largest = [(d, d.chances[0, :, -1].long().tolist()) for d in documents]
    return TreeEvaluation(summed(counted, num_nodes, SpecDecodeStats), by_context(largest, depth))


def _replays(document: Document, depth: int) -> Iterator[SpecDecodeStats]:
    accepted, ends_in_leaf = document.chances.long().transpose(1, 2).tolist()  # [N][n] each
    for num_nodes, (leading, is_leaf) in enumerate(zip(accepted, ends_in_leaf, strict=True), 1):
        stats = SpecDecodeStats()
        for newest, num_drafts, kept in visited_steps(
            document.mask, leading, depth, document.limits
        ):
            num_positions = min(num_drafts, num_nodes)
            is_whole = kept == leading[newest - 1]  # else the answer's end cut the path
            ends = is_whole and bool(is_leaf[newest - 1])
            stats.observe(num_positions, kept, is_leaf=ends)
        yield stats


def _outcomes(evaluator: Evaluator, model: DraftModel, row: PackedRow, num_nodes: int) -> Tensor:
    """[2, n, N]: of the first 1 .. N nodes of a tree at each anchor, how many are accepted, and
    whether the last of these has no child."""
    counts = evaluator.draft_counts(model, row)  # [n]
    lattices, device = _lattices(evaluator, model, row, counts), model.network.norm.weight.device
    anchors = torch.nonzero(counts > 0).flatten()
    outcomes = torch.zeros(2, len(counts), num_nodes, dtype=torch.long)
    at_once = max(min(ANCHORS_AT_ONCE, evaluator.max_rows // BEAM), 1)
    for part in torch.split(anchors, at_once):
        lattice = limited(lattices(part.to(device)), counts[part].to(device))
        outcomes[:, part] = _outcomes_at(lattice, row, part, num_nodes).cpu()
    return outcomes


def _outcomes_at(lattice: Lattice, row: PackedRow, anchors: Tensor, num_nodes: int) -> Tensor:
    """[2, A, N]"""
    depth, here = lattice.token_ids.shape[1], lattice.token_ids.device
    tree = grow_tree(*lattice, num_nodes)
    text = _continuations(row, anchors, depth + 1).to(here)  # [A, K+1]
    row_depths = depths(tree.parents)  # [A, N+1]
    num_there = (tree.scores > -torch.inf).sum(1)
    walk = walk_tree(tree.token_ids, tree.parents, num_there, text.gather(1, row_depths), depth)
    taken = torch.arange(1, depth + 1, device=here) <= walk.num_accepted[:, None]  # [A, K]
    nodes = torch.arange(1, num_nodes + 1, device=here)
    accepted = (taken[:, :, None] & (walk.rows[:, 1:, None] <= nodes)).sum(1)  # [A, N]
    last = walk.rows.gather(1, accepted)  # [A, N]: the row at which the walk ends
    return torch.stack((accepted, _first_children(tree, num_there).gather(1, last) > nodes))


def _first_children(tree: Tree, num_there: Tensor) -> Tensor:
    """[A, N+1]: the first node behind each row; beyond all nodes where none is."""
    size = tree.parents.shape[1]
    nodes = torch.arange(1, size + 1, device=tree.parents.device).expand_as(tree.parents)
    nodes = torch.where(nodes <= num_there[:, None], nodes, size + 1)
    none = nodes.new_full((len(nodes), size + 1), size + 1)
    return none.scatter_reduce(1, tree.parents, nodes, "amin")


def _lattices(
    evaluator: Evaluator, model: DraftModel, row: PackedRow, counts: Tensor
) -> Callable[[Tensor], Lattice]:
    """The lattices at anchors [A] with so many drafts [n] behind each other. Behind these, they
    mean nothing."""
    if model.network.config.method == "eagle3":
        return BeamLattices(evaluator, model.network, row, counts)
    states = _draft_states(evaluator, model, row, counts)
    return partial(_lattice, model.network, states)


def _lattice(network: EagleNetwork, states: DraftStates, anchors: Tensor) -> Lattice:
    """As models/p_eagle.py makes it of a batch."""
    normed = states.normed[anchors]
    candidates = Candidates(*(x[anchors] for x in states.candidates))
    if network.correction is None or normed.shape[1] == 1:
        return Lattice(candidates.token_ids, independent(candidates.log_probs))
    log_probs = network.correction.log_probs(
        normed,
        candidates,
        None,
        network.embedding.weight,
        network.output_rows(candidates.token_ids),
    )
    return Lattice(candidates.token_ids, log_probs)


def _continuations(row: PackedRow, anchors: Tensor, count: int) -> Tensor:
    """[A, count]: what the text has from the token after the newest on, in the same document."""
    slots = anchors[:, None] + 2 + torch.arange(count)
    last = len(row.token_ids) - 1
    is_text = (slots <= last) & (row.document[slots.clamp(max=last)] == row.document[anchors, None])
    return torch.where(is_text, row.token_ids[slots.clamp(max=last)], NOT_WRITTEN)


def _draft_states(
    evaluator: Evaluator, model: DraftModel, row: PackedRow, counts: Tensor
) -> DraftStates:
    network = model.network
    features = evaluator.source(row, evaluator.source.fetch(row))
    weight, size = network.norm.weight, (len(counts), evaluator.max_tokens)
    normed = weight.new_zeros(*size, network.config.hidden_size)
    token_ids = weight.new_zeros(*size, BEAM, dtype=torch.long)
    log_probs = weight.new_zeros(*size, BEAM, dtype=torch.float32)
    for segment in evaluator.segments_of(network, row, counts):
        here = segment.to(weight.device)
        with evaluator.autocast():
            states, _, table = model(here, features)
            found = _candidates(network, states, table, evaluator.chunk_rows)
        real = here.weights > 0  # the others are padding
        places = here.elements.anchor[here.rows].long()[real], here.loss_depth.long()[real]
        normed[places] = states[real].to(normed.dtype)
        token_ids[places], log_probs[places] = found.token_ids[real], found.log_probs[real]
    return DraftStates(normed, Candidates(token_ids, log_probs))


def _candidates(
    network: EagleNetwork, states: Tensor, table: Weight, chunk_rows: int
) -> Candidates:
    """Of states [C, H], in chunks: all logits at once would be the largest tensor."""
    ids, parts = network.target_ids, []
    for part in torch.split(states, chunk_rows):
        log_probs = at_least_float32(linear(part, table)).log_softmax(-1)
        parts.append(log_probs.topk(BEAM))
    best, columns = (torch.cat(x) for x in zip(*parts, strict=True))
    return Candidates(ids[columns], best.float())

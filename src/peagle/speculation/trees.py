"""Drafts as trees: several continuations of one prefix, verified in one pass.

Rows of a request: row 0 is its newest token, row n its node n. A node's parent is the row of the
token before it, so a chain is the tree with parents 0, 1, 2 ... Nodes are in falling order of the
probability of their whole path; a parent therefore stands before its children, and any first n
nodes are a tree, too: the n best.

The **lattice** that trees and chains are grown from: M candidates for each of K depths, and their
log-probabilities behind each candidate of the depth before. Where depths do not depend on each
other these are the same behind all. A drafter that runs once for each depth has other candidates
behind each path of its beam: then tokens and log-probabilities are by path.

Shapes: B requests, N nodes, K depths, M candidates at each depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BEAM = 8  # candidates at each depth, and paths that go on from it
# Rows of a tree are bits of an int64: row 0, and so many depths of a beam that is drafted pass by
# pass. The last depth needs no rows.
MAX_BEAM_DEPTH = 63 // BEAM + 1


class Lattice(NamedTuple):
    token_ids: Tensor  # [B, K, M] int64; by path [B, K, M, M]: behind which path, which candidate
    log_probs: Tensor  # [B, K, M, M] float32: behind which candidate, or path, of which candidate


class Beam(NamedTuple):
    """The best paths of one depth: continuation `places % M` of path `places // M` of the last."""

    scores: Tensor  # [B, M] float32
    places: Tensor  # [B, M] int64


class Tree(NamedTuple):
    token_ids: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64: rows
    scores: Tensor  # [B, N] float32: log-probability of the path; -inf where there is no node


class Walk(NamedTuple):
    """The path that the target takes through a tree."""

    num_accepted: Tensor  # [B]
    rows: Tensor  # [B, K+1]: row of each token on it, from row 0 on; then the last of them again
    is_leaf: Tensor  # [B] bool: no node stands behind the last


def max_tree_depth(method: str, max_speculative_tokens: int) -> int:
    """Of a drafter with chains of so many tokens at most."""
    if method == "eagle3":  # a pass for each depth, over the rows of its beam
        return min(max_speculative_tokens, MAX_BEAM_DEPTH)
    return max_speculative_tokens


def num_candidates(depth: int, beam: int) -> int:
    """The largest tree that `grow_tree` can give."""
    return beam + (depth - 1) * beam * beam


def grow_tree(token_ids: Tensor, log_probs: Tensor, num_nodes: int) -> Tree:
    """The best paths through a lattice, [B, K, M] or, by path, [B, K, M, M]; and [B, K, M, M].

    A beam of M paths: each has M continuations at the next depth, and the best M of these go on.
    The nodes are the best of all continuations. Sums only fall along a path, and of equal ones the
    earlier comes first, so a node's parent is always among the nodes before it.
    """
    by_path = token_ids.dim() == 4
    if not by_path:
        token_ids = token_ids[:, :, None].expand_as(log_probs)
    batch, depth, beam, _ = log_probs.shape
    log_probs = usable_log_probs(log_probs)
    first = token_ids[:, 0, 0]
    tokens, scores, parents = [first], [log_probs[:, 0, 0]], [-torch.ones_like(first)]
    beam_scores = log_probs[:, 0, 0]  # [B, M]
    paths = torch.arange(beam, device=token_ids.device).expand(batch, beam)
    beam_places, last = paths, paths  # in the pool; the candidate at the end of each path
    for d in range(1, depth):
        before = (paths if by_path else last)[..., None].expand(-1, -1, beam)
        sums = continuations(beam_scores, log_probs[:, d].gather(1, before))
        tokens.append(token_ids[:, d].flatten(1))
        scores.append(sums)
        parents.append(beam_places.repeat_interleave(beam, dim=1))
        beam_scores, best = best_continuations(sums, beam)
        beam_places, last = best + num_candidates(d, beam), best % beam
    return _best_nodes(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), num_nodes)


def limited(lattice: Lattice, num_depths: Tensor) -> Lattice:
    """Its first depths, so many [B], alone."""
    depth = torch.arange(lattice.token_ids.shape[1], device=num_depths.device)
    is_drafted = (depth < num_depths[:, None])[..., None, None]
    return lattice._replace(log_probs=lattice.log_probs.masked_fill(~is_drafted, -torch.inf))


def continuations(beam_scores: Tensor, log_probs: Tensor) -> Tensor:
    """Of paths [B, M], each with M candidates behind it [B, M, M].  # -> [B, M * M]"""
    return (beam_scores[:, :, None] + log_probs).flatten(1)


def best_continuations(sums: Tensor, beam: int) -> Beam:
    best = sums.sort(dim=1, descending=True, stable=True).indices[:, :beam]
    return Beam(sums.gather(1, best), best)


def best_chain(token_ids: Tensor, log_probs: Tensor) -> Tensor:
    """The best candidate of each depth behind the one before.  # -> [B, K]"""
    log_probs = usable_log_probs(log_probs)
    last = log_probs[:, 0, 0].argmax(1, keepdim=True)  # [B, 1]
    chain = [token_ids[:, 0].gather(1, last)]
    for d in range(1, token_ids.shape[1]):
        behind = log_probs[:, d].gather(1, last[..., None].expand(-1, -1, log_probs.shape[3]))
        last = behind[:, 0].argmax(1, keepdim=True)
        chain.append(token_ids[:, d].gather(1, last))
    return torch.cat(chain, dim=1)


def usable_log_probs(log_probs: Tensor) -> Tensor:
    """At most 0, and -inf where they are not numbers."""
    return log_probs.clamp(max=0.0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)


def independent(log_probs: Tensor) -> Tensor:
    """[B, K, M] -> a lattice whose depths do not depend on each other  # [B, K, M, M]"""
    return log_probs[:, :, None, :].expand(-1, -1, log_probs.shape[2], -1)


def _best_nodes(tokens: Tensor, scores: Tensor, parents: Tensor, num_nodes: int) -> Tree:
    """Of a pool of candidates; `parents` are places in it, -1: the newest token."""
    order = scores.sort(dim=1, descending=True, stable=True).indices  # [B, pool]
    rows = torch.empty_like(order).scatter_(
        1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    )
    chosen = order[:, :num_nodes]
    places = parents.gather(1, chosen)
    parent_rows = torch.where(places < 0, 0, rows.gather(1, places.clamp(min=0)))
    return Tree(tokens.gather(1, chosen), parent_rows, scores.gather(1, chosen))


def depths(parents: Tensor) -> Tensor:
    """Of rows 0 .. N.  # [B, N] -> [B, N+1]"""
    out = parents.new_zeros(parents.shape[0], parents.shape[1] + 1)
    for n in range(parents.shape[1]):
        out[:, n + 1] = out.gather(1, parents[:, n : n + 1])[:, 0] + 1
    return out


def ancestors(parents: Tensor) -> Tensor:
    """Bit j of row r: r is row j or comes after it.  # [B, N] -> [B, N+1] int64"""
    out = parents.new_ones(parents.shape[0], parents.shape[1] + 1)
    for n in range(parents.shape[1]):
        out[:, n + 1] = out.gather(1, parents[:, n : n + 1])[:, 0] | (1 << (n + 1))
    return out


def pruned(
    token_ids: Sequence[int], parents: Sequence[int], kept: Sequence[int]
) -> tuple[list[int], list[int]]:
    """One tree without the nodes that are not `kept` -> tokens and parents. Whose child is kept, is
    kept itself."""
    row_of = {0: 0} | {node + 1: row for row, node in enumerate(kept, start=1)}
    return [token_ids[node] for node in kept], [row_of[parents[node]] for node in kept]


def walk_tree(
    token_ids: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor, depth: int
) -> Walk:
    """Takes the target's own token at each row, and goes on while a node carries it.

    token_ids, parents  # [B, N]
    num_nodes           # [B] how many of them are to be looked at
    target_tokens       # [B, N+1] the target's choice at each row

    Every token on the path is the target's choice after that very prefix, so as in
    `verify_coupled` the output is the same with any tree or none. No two children of a row carry
    the same token.
    """
    batch, size = token_ids.shape
    is_there = torch.arange(size, device=token_ids.device) < num_nodes[:, None]
    row = num_nodes.new_zeros(batch)
    num_accepted, rows = row.clone(), [row]
    for _ in range(depth):
        wanted = target_tokens.gather(1, row[:, None])
        carries = is_there & (parents == row[:, None]) & (token_ids == wanted)  # [B, N]
        found = carries.any(1)
        first = torch.nn.functional.pad(carries.int(), (0, 1)).argmax(1)  # N may be 0
        row = torch.where(found, first + 1, row)
        num_accepted = num_accepted + found
        rows.append(row)
    has_child = (is_there & (parents == row[:, None])).any(1)
    return Walk(num_accepted, torch.stack(rows, dim=1), ~has_child)

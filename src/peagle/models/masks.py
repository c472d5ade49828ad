"""Who may attend to whom in parallel prediction, as named predicates over broadcast indices.

An element (anchor a, depth d) stands at position a + d. Depth 0 has the real token and feature;
depth d >= 1 is a mask row of the rollout that starts at a. At inference attention is
causal over the cache, the NTP row and earlier mask rows; these predicates say the same of a flat
sequence that holds many rollouts at once.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Elements(NamedTuple):
    """One entry per row; rows of several documents may lie side by side."""

    anchor: Tensor  # [N]
    depth: Tensor  # [N]
    document: Tensor  # [N]

    @property
    def positions(self) -> Tensor:
        return self.anchor + self.depth


def may_attend(query: Elements, key: Elements) -> Tensor:
    """Broadcasts: give query fields as [N, 1] and key fields as [1, N] for the whole mask."""
    same_document = query.document == key.document
    key_is_real = key.depth == 0
    key_not_after_anchor = key.anchor <= query.anchor
    same_rollout = key.anchor == query.anchor
    key_not_deeper = key.depth <= query.depth
    sees_context = key_is_real & key_not_after_anchor
    sees_own_rollout = same_rollout & key_not_deeper
    return same_document & (sees_context | sees_own_rollout)


def dense_mask(elements: Elements) -> Tensor:
    """[N, N] boolean: True where the row's query may see the column's key."""
    query = Elements(*(field[:, None] for field in elements))
    key = Elements(*(field[None, :] for field in elements))
    return may_attend(query, key)

"""The training mask, against its definition in prose and against causal attention."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.models.attention import MaskedAttention, causal_attention
from peagle.models.masks import Elements, dense_mask, may_attend
from peagle.models.rollouts import full_rollouts

Rows = list[tuple[int, int, int]]  # anchor, depth, document

rows = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=24
)


def as_elements(rows: Rows) -> Elements:
    return Elements(*(torch.tensor(field) for field in zip(*rows, strict=True)))


def sees(query: tuple[int, int, int], key: tuple[int, int, int]) -> bool:
    """Element (a, d) may attend to every depth-0 element of its document with anchor <= a,
    and to elements of its own rollout (same anchor) with depth <= d."""
    (anchor, depth, document), (key_anchor, key_depth, key_document) = query, key
    if document != key_document:
        return False
    if key_depth == 0 and key_anchor <= anchor:
        return True
    return key_anchor == anchor and key_depth <= depth


@given(rows)
def test_dense_mask_is_the_definition_row_by_row(rows: Rows) -> None:
    mask = dense_mask(as_elements(rows))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[sees(query, key) for key in rows] for query in rows]


@given(rows, st.data())
def test_the_predicate_broadcasts_over_any_indices(rows: Rows, data: st.DataObject) -> None:
    pick = st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5)
    queries, keys = data.draw(pick), data.draw(pick)
    elements = as_elements(rows)
    query = Elements(*(field[queries][:, None] for field in elements))
    key = Elements(*(field[keys][None, :] for field in elements))
    wanted = [[sees(rows[q], rows[k]) for k in keys] for q in queries]
    assert may_attend(query, key).tolist() == wanted


@given(st.integers(1, 6), st.integers(1, 4))
def test_full_rollouts_hold_each_anchor_with_each_depth_once(num: int, depths: int) -> None:
    elements = full_rollouts(num, depths)
    pairs = list(zip(elements.anchor.tolist(), elements.depth.tolist(), strict=True))
    assert sorted(pairs) == [(a, d) for a in range(num) for d in range(depths)]
    assert pairs[:num] == [(a, 0) for a in range(num)]  # the real rows come first
    assert elements.positions.tolist() == [a + d for a, d in pairs]
    assert elements.document.tolist() == [0] * len(pairs)


@given(st.integers(1, 6), st.integers(1, 4))
def test_each_rollout_sees_one_causal_line(num: int, depths: int) -> None:
    """As at inference: behind each element stands exactly one row for each position."""
    elements = full_rollouts(num, depths)
    for row, visible in enumerate(dense_mask(elements)):
        positions = sorted(elements.positions[visible].tolist())
        assert positions == list(range(int(elements.positions[row]) + 1))


def test_a_window_hides_what_is_as_far_away_as_it_is_wide() -> None:
    positions = torch.arange(6)
    attention = causal_attention(positions)
    q = k = torch.zeros(6, 1, 6, dtype=torch.float64)
    v = torch.eye(6, dtype=torch.float64)[:, None]
    seen = attention(0, q, k, v, 3)[:, 0] > 0
    wanted = [[0 <= i - j < 3 for j in range(6)] for i in range(6)]
    assert seen.tolist() == wanted
    assert (attention(0, q, k, v, None)[:, 0] > 0).tolist() == attention.mask.tolist()


def test_a_window_counts_positions_and_not_rows() -> None:
    positions = torch.tensor([0, 5, 6])
    everything = torch.ones(3, 3, dtype=torch.bool).tril()
    attention = MaskedAttention(everything, positions)
    q = k = torch.zeros(3, 1, 3, dtype=torch.float64)
    v = torch.eye(3, dtype=torch.float64)[:, None]
    seen = attention(0, q, k, v, 2)[:, 0] > 0
    assert seen.tolist() == [[True, False, False], [False, True, False], [False, True, True]]

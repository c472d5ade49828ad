"""COD draws exactly the elements that its definition allows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.data.packing import PackedRow, lay_out
from peagle.teacher_forcing.partition import build_segments, supervised_runs
from peagle.train.cod import draw_depths, limit_masks, retentions

documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


def row_of(masks: list[list[bool]], padding: int = 3) -> PackedRow:
    tensors = [torch.tensor(m) for m in masks]
    tokens = [torch.arange(len(m)) for m in masks]
    return lay_out(tokens, tensors, [], sum(map(len, masks)) + padding)


def allowed(masks: list[list[bool]], depths: int) -> set[tuple[int, int]]:
    """(slot, depth) by the definition: every token up to its own is supervised and exists."""
    found, start = set(), 0
    for mask in masks:
        for anchor in range(len(mask)):
            for depth in range(depths):
                wanted = range(anchor + 2, anchor + depth + 3)
                if all(t < len(mask) and mask[t] for t in wanted):
                    found.add((start + anchor, depth))
        start += len(mask)
    return found


def elements(counts: torch.Tensor) -> set[tuple[int, int]]:
    return {(slot, d) for slot, count in enumerate(counts.tolist()) for d in range(count)}


@given(documents, st.integers(0, 3))
def test_without_drops_all_supervised_elements_are_kept(
    masks: list[list[bool]], padding: int
) -> None:
    row = row_of(masks, padding)
    runs = supervised_runs(row)
    counts = draw_depths(runs, retentions(4, 1.0, 0.0), torch.Generator().manual_seed(0))
    assert elements(counts) == allowed(masks, 4)


def test_a_run_reaches_the_last_token_of_a_row_without_padding() -> None:
    assert supervised_runs(row_of([[False, True, True, True]], padding=0)).tolist() == [2, 1, 0, 0]


@given(documents, st.integers(0, 1000), st.floats(0.1, 1.0), st.floats(0.0, 0.5))
def test_what_is_kept_is_nested_and_allowed(
    masks: list[list[bool]], seed: int, rate: float, floor: float
) -> None:
    runs = supervised_runs(row_of(masks))
    counts = draw_depths(runs, retentions(5, rate, floor), torch.Generator().manual_seed(seed))
    kept = elements(counts)
    assert kept <= allowed(masks, 5)
    assert all((slot, d - 1) in kept for slot, d in kept if d > 0)
    assert {e for e in allowed(masks, 5) if e[1] == 0} <= kept, "depth 0 is never dropped"


def test_each_depth_keeps_its_share() -> None:
    runs = torch.full((200_000,), 10)
    counts = draw_depths(runs, retentions(6, 0.7, 0.2), torch.Generator().manual_seed(0))
    shares = [(counts > d).float().mean().item() for d in range(6)]
    expected = [1.0, 0.7, 0.49, 0.343, 0.2401, 0.2]
    torch.testing.assert_close(shares, expected, atol=0.005, rtol=0)


def test_a_supervised_first_token_gives_no_anchor_before_the_document() -> None:
    row = row_of([[True, True, True], [True, True, True, True]])
    assert supervised_runs(row)[:7].tolist() == [1, 0, 0, 2, 1, 0, 0]


@given(documents, st.integers(0, 9))
def test_cutting_to_a_fixed_size_keeps_rollouts_nested(masks: list[list[bool]], room: int) -> None:
    counts = supervised_runs(row_of(masks)).clamp(max=4)
    cut, num_cut = limit_masks(counts, room)
    assert elements(cut) <= elements(counts)
    assert len(elements(counts)) - len(elements(cut)) == num_cut
    assert (cut - 1).clamp(min=0).sum() <= room
    assert ((cut > 0) == (counts > 0)).all()


@given(documents)
def test_a_loss_row_knows_the_token_it_predicts(masks: list[list[bool]]) -> None:
    row = row_of(masks)
    counts = supervised_runs(row).clamp(max=3)
    (segment,) = build_segments(row, counts, [0, len(row.token_ids)], torch.ones(3))
    slot, depth = segment.elements.anchor[segment.rows], segment.loss_depth
    assert set(zip(slot.tolist(), depth.tolist(), strict=True)) == allowed(masks, 3)
    # Tokens are numbered by position, so the label is the position of what is predicted.
    assert segment.labels.tolist() == (row.position[slot] + depth + 2).tolist()
    assert segment.slots.tolist() == (slot + depth + 1).tolist()
    assert (row.document[segment.slots] == segment.elements.document[segment.rows]).all()

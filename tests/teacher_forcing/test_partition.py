"""A partition changes memory and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.data.packing import PackedRow
from peagle.teacher_forcing.draft_model import DraftModel
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.teacher_forcing.partition import (
    balanced_boundaries,
    boundaries_under,
    build_segments,
    segment_sizes,
    supervised_runs,
    unrolled_segment,
)
from peagle.train.cod import draw_depths, retentions
from peagle.train.losses import ChunkedLoss, Weighting
from peagle.train.optimizer import build_optimizer
from peagle.train.planner import PEaglePlanner
from peagle.train.recipe import OptimizerSection
from peagle.train.setup import checkpoint_activations
from peagle.train.trainer import Trainer
from tests.tiny import training
from tests.tiny.models import DEEP

rows = st.builds(
    training.packed,
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.just(40),
    seed=st.integers(0, 50),
    prompt=st.integers(0, 6),
    share=st.sampled_from([1.0, 0.8]),
)


def counts_of(row: PackedRow, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw_depths(supervised_runs(row), retentions(4, 0.8, 0.0), generator)


@given(
    rows,
    st.integers(0, 9),
    st.lists(st.integers(0, 40), max_size=4),
    st.none() | st.integers(0, 12),
)
def test_any_boundaries_train_each_element_once_with_all_it_may_see(
    row: PackedRow, seed: int, cuts: list[int], reach: int | None
) -> None:
    counts, boundaries = counts_of(row, seed), [0, *sorted(cuts), 40]
    segments = build_segments(row, counts, boundaries, torch.ones(4), reach=reach)
    sizes = [len(segment.positions) for segment in segments]
    assert sizes == [size for size in segment_sizes(row, counts, boundaries, reach) if size]
    in_loss = []
    for segment in segments:
        held = set(zip(*(f.tolist() for f in segment.elements[:2]), strict=True))
        for index in segment.rows.tolist():
            slot, depth, document = (int(f[index]) for f in segment.elements)
            in_loss.append((slot, depth))
            start = int((row.document == document).nonzero()[0])
            start = start if reach is None else max(start, slot - reach)
            assert {(s, 0) for s in range(start, slot + 1)} <= held
            assert {(slot, d) for d in range(depth + 1)} <= held
        whole = {slot: int(counts[slot]) for slot in segment.elements.anchor[segment.rows].tolist()}
        assert len(segment.rows) == sum(whole.values())  # no rollout is split
    expected = [(s, d) for s, count in enumerate(counts.tolist()) for d in range(count)]
    assert sorted(in_loss) == expected


@given(rows, st.integers(0, 9), st.integers(1, 3), st.none() | st.integers(0, 12))
@settings(max_examples=30)
def test_balanced_boundaries_make_the_largest_segment_smallest(
    row: PackedRow, seed: int, num_segments: int, reach: int | None
) -> None:
    counts = counts_of(row, seed)
    balanced = balanced_boundaries(row, counts, num_segments, reach)
    ours = max(segment_sizes(row, counts, balanced, reach))
    best = min(
        max(segment_sizes(row, counts, [0, *cuts, 40], reach))
        for cuts in itertools.combinations_with_replacement(range(41), num_segments - 1)
    )
    assert ours == best
    under = boundaries_under(row, counts, best, reach)
    assert max(segment_sizes(row, counts, under, reach)) <= best
    assert len(under) - 1 <= num_segments


def test_no_further_pass_is_made_where_it_would_not_make_the_largest_smaller() -> None:
    # The last token's context is the whole row: cut anywhere, one segment has all 40 rows.
    row = training.packed([40], 40)
    boundaries = balanced_boundaries(row, torch.ones(40, dtype=torch.long), 3)
    assert segment_sizes(row, torch.ones(40, dtype=torch.long), boundaries) == [40, 0, 0]


@given(rows, st.integers(0, 9), st.lists(st.integers(0, 40), max_size=2))
def test_each_loss_row_has_the_weight_of_its_own_depth(
    row: PackedRow, seed: int, cuts: list[int]
) -> None:
    counts, weights = counts_of(row, seed), torch.tensor([1.0, 0.5, 0.25, 0.125])
    segments = build_segments(row, counts, [0, *sorted(cuts), 40], weights)
    for segment in [*segments, unrolled_segment(row, counts, weights)]:
        depths = segment.elements.depth[segment.rows]
        assert segment.weights.tolist() == [0.5 ** int(d) for d in depths]
    total = sum(0.5**d for count in counts.tolist() for d in range(count))
    assert sum(float(s.weights.sum()) for s in segments) == pytest.approx(total)


def gradients(
    num_segments: int,
    packed: list[PackedRow],
    weighting: Weighting,
    window: int | None,
    reach: int | None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step over all rows, in float64."""
    model = DEEP.make_target()
    own = {"has_embed_tokens": True, "has_lm_head": True}
    network = training.trainable_head(model, sliding_window=window, **own)
    planner = PEaglePlanner(
        *(retentions(4, 0.8, 0.0), 0.9 ** torch.arange(4).double()),
        num_segments=num_segments,
        reach=reach,
    )
    optimizer = build_optimizer(network, OptimizerSection())
    draft_model = DraftModel(network)
    trainer = Trainer(
        draft_model,
        draft_model,
        OnlineFeatures(model, (2, 3, 5)),
        model.lm_head.weight,
        ChunkedLoss("kl", 16, compiled=False, weighting=weighting),
        optimizer,
        max_grad_norm=1e9,
        dtype=None,
    )
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        kept.update(
            {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        )

    optimizer.register_step_pre_hook(keep)
    planned = [planner(row, torch.Generator().manual_seed(i)) for i, row in enumerate(packed)]
    assert all(len(p.segments) == num_segments for p in planned)
    trainer.step(planned, 1e-3)
    return trainer.take_metrics().loss, kept


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    ("num_segments", "weighting"),
    [(2, "depth"), (3, "depth"), (5, "depth"), (2, "acceptance"), (5, "acceptance")],
)
def test_loss_and_gradients_equal_those_of_one_segment(
    num_segments: int, weighting: Weighting, window: int | None
) -> None:
    packed = [training.packed([30, 21, 8], 64, seed=1), training.packed([60], 64, seed=2)]
    reach = DEEP.head_config(sliding_window=window).reach
    loss, expected = gradients(1, packed, weighting, window, None)
    partitioned_loss, partitioned = gradients(num_segments, packed, weighting, window, reach)
    assert partitioned_loss == pytest.approx(loss, abs=1e-9)
    assert partitioned.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(partitioned[name], gradient, atol=1e-9, rtol=1e-9, msg=name)


def test_auto_takes_the_fewest_segments_that_fit() -> None:
    row = training.packed([60, 60], 128)
    planner = PEaglePlanner(retentions(4, 1.0, 0.0), torch.ones(4))
    for max_rows, expected in ((10_000, 1), (340, 2), (230, 3)):
        planner.max_rows = max_rows
        planned = planner(row, torch.Generator().manual_seed(0))
        assert len(planned.segments) == expected
        assert all(len(s.positions) <= max_rows for s in planned.segments)


def test_activation_checkpointing_changes_no_gradient() -> None:
    model = DEEP.make_target()
    row = training.packed([30, 21], 64)
    planner = PEaglePlanner(retentions(4, 1.0, 0.0), torch.ones(4))
    (segment,) = planner(row, torch.Generator().manual_seed(0)).segments
    features = OnlineFeatures(model, (2, 3, 5))(row)
    found = []
    for checkpointed in (False, True):
        network = training.trainable_head(model)
        if checkpointed:
            checkpoint_activations(network.layers, compiled=False)
        states = DraftModel(network)(segment, features).states
        (states**2).mean().backward()
        found.append([p.grad for p in network.parameters()])
    for gradient, checkpointed_gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, checkpointed_gradient)

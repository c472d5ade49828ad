"""Probabilities written by kernels are those that tokens are drawn from, by the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu import sampling as fast
from peagle.kernels.reference import sampling as reference
from peagle.kernels.reference.sampling import SampledTokens, SamplingMetadata
from tests.tolerance import near, rounding

from .test_sampling import (
    DEVICE,
    EXAMPLES,
    IDS,
    INF,
    MIXED,
    NAN,
    ROWS,
    SETTINGS,
    Setting,
    assert_same,
    make_metadata,
    random_logits,
)

UNFILTERED: list[Setting] = [(temperature, 0, 1.0, 0.0) for temperature, *_ in MIXED]


def probs_of(
    module, logits: Tensor, metadata: SamplingMetadata, ids=None, vocab_size=None, filters=True
):
    """The distribution of a module's draws, over the target's ids. Written into rows that lie apart
    and hold something else, as a step's do."""
    shape = (len(logits), 2, vocab_size or logits.shape[1])
    probs = torch.full(shape, NAN, device=logits.device)
    module.sample_with_probs(logits, metadata, ids, probs[:, 0], filters=filters)
    assert probs[:, 1].isnan().all()
    return probs[:, 0]


@pytest.mark.slow
@given(ROWS.filter(lambda row: max(row) > -INF), SETTINGS, st.booleans())
@settings(max_examples=EXAMPLES)
def test_the_distribution_keeps_what_the_definition_keeps(row, setting, reduced: bool) -> None:
    logits = torch.tensor([row], dtype=torch.float32, device=DEVICE)
    ids = IDS.to(DEVICE) if reduced else None
    args = logits, make_metadata([setting]), ids, 200 if reduced else 37
    expected = probs_of(reference, *args)
    torch.testing.assert_close(probs_of(fast, *args), expected, **near(terms=37))
    assert abs(float(expected.sum()) - 1.0) < rounding(terms=37)


@pytest.mark.slow
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_draws_and_probabilities_over_many_chunks_are_those_of_the_definition(
    filters: bool, reduced: bool
) -> None:
    logits, metadata = random_logits(4, 2500, 2.0), make_metadata(MIXED if filters else UNFILTERED)
    logits[2, 2400] = NAN
    ids = torch.arange(2500, device=DEVICE) * 3 + 1 if reduced else None  # token 0 has no column
    args = logits, metadata, ids, 7600 if reduced else 2500, filters
    probs = probs_of(fast, *args)
    torch.testing.assert_close(probs, probs_of(reference, *args), **near(1 / 2500, terms=2500))
    assert probs[2].nonzero().tolist() == [[0]]  # nothing can be drawn: token 0 alone
    out = torch.empty_like(probs)
    sampled = fast.sample_with_probs(logits, metadata, ids, out, filters=filters)
    assert_same(
        sampled,
        reference.sample_tokens(logits, metadata, ids, filters=filters),
        logits,
        metadata,
        ids,
    )
    assert (probs.gather(1, sampled.token_ids[:, None]) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("filters", [False, True])
def test_the_targets_probabilities_are_those_of_the_definition(filters: bool) -> None:
    logits, metadata = random_logits(4, 2500, 2.0), make_metadata(MIXED if filters else UNFILTERED)
    logits[3, 7] = INF
    ours, theirs = (m.token_probs(logits, metadata, filters=filters) for m in (fast, reference))
    close = near(1 / 2500, terms=2500)
    torch.testing.assert_close(ours.probs, theirs.probs, **close)
    assert ours.usable.tolist() == theirs.usable.tolist() == [True, True, True, False]
    drawn = torch.empty_like(ours.probs)
    fast.sample_with_probs(logits, metadata, None, drawn, filters=filters)
    assert torch.equal(drawn, ours.probs)


@pytest.mark.slow
def test_a_distribution_does_not_depend_on_its_neighbours() -> None:
    logits, metadata = random_logits(4, 1500), make_metadata(MIXED)
    together = fast.token_probs(logits, metadata).probs
    for row in (0, 1, 3):
        own = SamplingMetadata(*(column[row : row + 1] for column in metadata))
        alone = fast.token_probs(logits[row : row + 1], own).probs
        assert torch.equal(alone[0], together[row])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ((1.0, 0, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((1.0, 1, 1.0, 0.0), {1}),
        ((1.0, 2, 1.0, 0.0), {1, 2, 3}),  # 2 and 3 tie at the threshold: both stay
        ((1.0, 99, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((1.0, 0, 0.45, 0.0), {1, 2}),  # 0.4 is short of it; of the tied 2 and 3 the lower id
        ((1.0, 0, 1e-9, 0.0), {1}),
        ((1.0, 0, 0.85, 0.0), {0, 1, 2, 3}),
        ((1.0, 0, 1.0, 0.4), {1, 2, 3}),
        ((1.0, 2, 0.45, 0.0), {1}),  # top-p on what top-k left: 0.5 reaches 0.45
        ((1.0, 0, 0.45, 0.4), {1}),  # and on what min-p left
    ],
)
def test_each_filter_keeps_what_it_should(setting: Setting, kept: set[int]) -> None:
    logits = torch.tensor([[0.14, 0.4, 0.2, 0.2, 0.06]], device=DEVICE).log()
    probs = probs_of(fast, logits, make_metadata([setting]))
    assert set(probs[0].nonzero().flatten().tolist()) == kept


def test_logits_that_only_temperature_makes_equal_are_equal() -> None:
    """Top-k keeps ties of the scaled logits; the search runs on the unscaled ones."""
    low = torch.tensor(1.9)
    high = torch.nextafter(low, 2 * low)
    logits = torch.full((1, 40), -1.0)
    logits[0, [3, 5]] = torch.stack([low, high])
    temperature = next(t for t in (1.5, 1.6, 1.7, 1.8) if low / t == high / t)
    metadata = make_metadata([(temperature, 1, 1.0, 0.0)])
    probs = probs_of(fast, logits.to(DEVICE), metadata)
    assert probs[0].nonzero().flatten().tolist() == [3, 5]


def test_greedy_and_broken_rows_have_a_distribution_of_one_token() -> None:
    logits = random_logits(3, 40)
    logits[1, 3] = NAN
    metadata = make_metadata([(0.0, 5, 0.5, 0.1), (1.0, 5, 0.5, 0.1), (1.0, 0, 1.0, 0.0)])
    probs = probs_of(fast, logits, metadata)
    assert probs[0].nonzero().tolist() == [[int(logits[0].argmax())]]
    assert probs[1].nonzero().tolist() == [[0]]
    assert (probs[2] > 0).all()


# --- real sizes

WHOLE, REDUCED = 49_152, 32_000  # tokens of the target, and of a drafter


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_real_vocabulary_has_the_probs_and_draws_of_the_cpu(filters: bool, reduced: bool) -> None:
    logits = random_logits(9, REDUCED if reduced else WHOLE, 2.0)
    logits[4, 77] = NAN
    metadata = make_metadata((3 * (MIXED if filters else UNFILTERED))[:9])
    every = torch.randperm(WHOLE, generator=torch.Generator().manual_seed(1))
    ids = every[:REDUCED].sort().values.to(DEVICE) if reduced else None
    on_cpu = (
        logits.cpu(),
        SamplingMetadata(*(r.cpu() for r in metadata)),
        None if ids is None else ids.cpu(),
    )
    probs = probs_of(fast, logits, metadata, ids, WHOLE, filters)
    close = near(0.0, terms=WHOLE)  # most probabilities are tiny
    torch.testing.assert_close(probs.cpu(), probs_of(reference, *on_cpu, WHOLE, filters), **close)
    sampled = fast.sample_with_probs(
        logits, metadata, ids, torch.empty_like(probs), filters=filters
    )
    expected = reference.sample_tokens(*on_cpu, filters=filters)
    assert_same(SampledTokens(*(x.cpu() for x in sampled)), expected, *on_cpu)
    if not reduced:
        ours, theirs = (
            fast.token_probs(logits, metadata, filters=filters),
            reference.token_probs(*on_cpu[:2]),
        )
        assert torch.equal(ours.probs, probs)
        assert ours.usable.tolist() == theirs.usable.tolist()

"""Each row of a step is usable or not by its own logits, under both kinds of verification."""

from __future__ import annotations

import pytest
import torch

from peagle.engine.sampler import (
    CoupledSampler,
    RejectionSampler,
    SampledSlots,
    Sampler,
    Sampling,
)
from peagle.kernels.step_ops import step_ops
from peagle.models.drafter import Packing

from .test_rejection_rule import CPU, given, state_for

BATCH, DEPTH, VOCAB = 3, 2, 8
DRAFTS = torch.ones(BATCH, DEPTH, dtype=torch.int64)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", ["sampled", "filtered"])
@pytest.mark.parametrize("kind", [CoupledSampler, RejectionSampler])
def test_a_nan_in_a_later_row_spares_the_rows_before_it_and_other_requests(
    kind: type[CoupledSampler] | type[RejectionSampler], sampling: Sampling, bad: float
) -> None:
    state = state_for(BATCH, DEPTH, VOCAB)
    state.draft_probs.fill_(1 / VOCAB)
    slots = torch.arange(BATCH)
    sampler: Sampler = kind(step_ops(CPU), SampledSlots(state, slots, slots, sampling))
    logits = torch.randn(BATCH * (DEPTH + 1), VOCAB, generator=torch.Generator().manual_seed(0))
    rows, num_drafts = Packing(len(logits), None, DEPTH + 1), torch.full((BATCH,), DEPTH)
    sound = sampler.verify(given(logits), DRAFTS, num_drafts, rows)
    assert sound.usable.all()
    logits[1 * (DEPTH + 1) + 2, 5] = bad  # the last row of the second request
    output = sampler.verify(given(logits), DRAFTS, num_drafts, rows)
    assert output.usable.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    others = [0, 2]
    assert torch.equal(output.sampled_token_ids[others], sound.sampled_token_ids[others])

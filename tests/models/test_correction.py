"""The correction: serving's log-probabilities are those of training's states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.reference.trees import Candidates
from peagle.models.correction import Correction, initialise_correction
from peagle.speculation.trees import independent

HIDDEN, SIZE, VOCAB, COUNT = 12, 10, 30, 4
seeds = st.integers(0, 2**31)


def drawn(seed: int, batch: int, depth: int) -> tuple[Correction, Tensor, Tensor, Candidates]:
    """A correction, states [B, K, H], a table [V, H] and the candidates of the states' logits."""
    generator = torch.Generator().manual_seed(seed)
    correction = Correction(HIDDEN, SIZE, 1e-5).double().requires_grad_(False)
    for weight in correction.parameters():
        weight.normal_(0.0, 0.5, generator=generator)
    normed = torch.randn(batch, depth, HIDDEN, generator=generator).double()
    table = torch.randn(VOCAB, HIDDEN, generator=generator).double()
    best = (normed @ table.t()).log_softmax(-1).topk(COUNT)
    return correction, normed, table, Candidates(best.indices, best.values)


@settings(deadline=None)
@given(seeds, st.integers(1, 2), st.integers(2, 4), st.sampled_from([0.0, 0.6, 1.4]))
def test_candidates_are_scored_by_the_states_that_training_sees(
    seed: int, batch: int, depth: int, temperature: float
) -> None:
    correction, normed, table, candidates = drawn(seed, batch, depth)
    scale = temperature or 1.0
    if temperature:
        plain = ((normed @ table.t()) / scale).log_softmax(-1)
        candidates = candidates._replace(log_probs=plain.gather(2, candidates.token_ids))
    temperatures = torch.full((batch,), temperature, dtype=torch.float64)
    found = correction.log_probs(
        normed, candidates, temperatures, table, (table, candidates.token_ids)
    )
    for b in range(batch):
        assert torch.equal(found[b, 0], candidates.log_probs[b, 0].expand(COUNT, COUNT))
        for d in range(1, depth):
            held = candidates.log_probs[b, d].logsumexp(0)
            for place, token in enumerate(candidates.token_ids[b, d - 1].tolist()):
                state = correction(normed[b, d][None], table[token][None])
                logits = (state @ table.t())[0, candidates.token_ids[b, d]] / scale
                torch.testing.assert_close(found[b, d, place], logits.log_softmax(0) + held)


@given(seeds)
def test_an_untrained_correction_changes_nothing(seed: int) -> None:
    correction, normed, table, candidates = drawn(seed, 2, 3)
    initialise_correction(correction, torch.Generator().manual_seed(0))
    embeddings = F.embedding(candidates.token_ids[0, 0], table)
    assert torch.equal(correction(normed[0, :1].expand(COUNT, -1), embeddings)[0], normed[0, 0])
    found = correction.log_probs(normed, candidates, None, table, (table, candidates.token_ids))
    torch.testing.assert_close(found, independent(candidates.log_probs))

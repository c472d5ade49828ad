"""Triton's part of a correction equals the module's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.reference.trees import Candidates
from peagle.models.correction import Correction
from peagle.models.layers import silu_mul

from .batch_cases import DEVICE, EXAMPLES

gpu = pytest.importorskip("peagle.kernels.gpu.correction")

seeds = st.integers(0, 2**31)
HIDDEN, SIZE, VOCAB = 72, 40, 50


@given(seeds, st.integers(1, 9))
@settings(max_examples=EXAMPLES, deadline=None)
def test_embeddings_are_normed_by_their_root_mean_square(seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, HIDDEN, generator=generator).to(DEVICE)
    ids = torch.randint(VOCAB, (rows,), generator=generator).to(DEVICE)
    expected = F.rms_norm(table[ids], (HIDDEN,), None, 1e-5)
    torch.testing.assert_close(gpu.normed_rows(table, ids, 1e-5), expected)


@given(seeds, st.integers(1, 4), st.sampled_from([1, 4, 8]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_row_is_gated_with_its_own_state(seed: int, states: int, per_state: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    of_states = torch.randn(states, 2 * SIZE, generator=generator).to(DEVICE)
    of_tokens = torch.randn(states * per_state, 2 * SIZE, generator=generator).to(DEVICE)
    expected = silu_mul(of_states.repeat_interleave(per_state, 0) + of_tokens)
    torch.testing.assert_close(gpu.gate_rows(of_states, of_tokens), expected)


@given(seeds, st.integers(1, 3), st.integers(2, 4), st.sampled_from(["greedy", "sampled"]))
@settings(max_examples=EXAMPLES, deadline=None)
def test_log_probabilities_are_the_modules(
    seed: int, batch: int, depth: int, sampling: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    correction = Correction(HIDDEN, SIZE, 1e-5).requires_grad_(False)
    for weight in correction.parameters():
        weight.normal_(0.0, 0.3, generator=generator)
    correction.to(DEVICE)
    table = torch.randn(VOCAB, HIDDEN, generator=generator).to(DEVICE)
    normed = torch.randn(batch, depth, HIDDEN, generator=generator).to(DEVICE)
    logits = torch.randn(batch, depth, VOCAB, generator=generator)
    logits[..., ::7] = -torch.inf  # filtered
    best = logits.log_softmax(-1).topk(8)
    candidates = Candidates(best.indices.to(DEVICE), best.values.to(DEVICE))
    temperature = torch.tensor([0.0, 0.7, 1.3])[:batch].to(DEVICE)
    arguments = (candidates, temperature if sampling == "sampled" else None)
    output = (table, candidates.token_ids)
    with torch.no_grad():
        states = normed[:, 1:].reshape(-1, HIDDEN)
        ours = correction._on_gpu(states, *arguments, table, output)
        on_cpu = correction.cpu()
        expected = on_cpu.log_probs(
            normed.cpu(),
            Candidates(*(x.cpu() for x in candidates)),
            None if arguments[1] is None else arguments[1].cpu(),
            table.cpu(),
            (table.cpu(), candidates.token_ids.cpu()),
        )
    torch.testing.assert_close(ours.cpu(), expected, atol=2e-4, rtol=1e-3)

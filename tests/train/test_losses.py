"""The chunked loss equals the one over all logits, in value and in gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.train.losses import ChunkedLoss, LossKind, Tables, Truth

C, H, V, N = 23, 8, 17, 30


def case() -> tuple[Tensor, Tensor, Tensor, Truth, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    truth = Truth(
        random(N, H),
        torch.randint(N, (C,), generator=generator),
        torch.randint(V, (C,), generator=generator),
    )
    weights = torch.rand(C, generator=generator, dtype=torch.float64)
    weights[-3:] = 0.0  # padding
    return random(C, H), random(V, H), random(V, H), truth, weights


def at_once(
    kind: LossKind, states: Tensor, tables: Tables, truth: Truth, weights: Tensor
) -> Tensor:
    log_q = F.log_softmax(states @ tables.draft.t(), -1)
    if kind == "ce":
        return (F.nll_loss(log_q, truth.labels, reduction="none") * weights).sum()
    log_p = F.log_softmax(truth.states[truth.slots] @ tables.target.t(), -1)
    return (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * weights).sum()


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 23, 100])
def test_chunks_change_neither_loss_nor_gradients(kind: LossKind, chunk_rows: int) -> None:
    states, draft, target, truth, weights = case()
    results = []
    for chunked in (True, False):
        leaves = [states.clone().requires_grad_(), draft.clone().requires_grad_()]
        tables = Tables(leaves[1], target)
        if chunked:
            output = ChunkedLoss(kind, chunk_rows, compiled=False)(
                leaves[0], tables, truth, weights
            )
            loss = output.loss
        else:
            loss = at_once(kind, leaves[0], tables, truth, weights)
        (3 * loss).backward()
        results.append([loss, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_a_match_is_the_target_argmax_for_kl_and_the_written_token_for_ce() -> None:
    states, draft, target, truth, weights = case()
    best = (states @ draft.t()).argmax(-1)
    wanted = (truth.states[truth.slots] @ target.t()).argmax(-1)
    for kind, expected in (("kl", best == wanted), ("ce", best == truth.labels)):
        output = ChunkedLoss(kind, 5, compiled=False)(states, Tables(draft, target), truth, weights)
        assert torch.equal(output.matches, expected)


def test_a_frozen_table_gets_no_gradient() -> None:
    states, draft, target, truth, weights = case()
    states.requires_grad_()
    output = ChunkedLoss("kl", 5, compiled=False)(states, Tables(draft, target), truth, weights)
    output.loss.backward()
    assert states.grad is not None
    assert draft.grad is None

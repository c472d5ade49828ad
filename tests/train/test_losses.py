"""The chunked loss equals the one over all logits, in value and in gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.train.cod import retentions
from peagle.train.losses import ChunkedLoss, LossKind, Rollouts, Tables, Truth
from peagle.train.planner import build_planner
from tests.tiny import training
from tests.tiny.models import DEEP

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


# Anchor -> rows of its drafts in order, deep ones behind all others as in a segment. Row 5 is a
# token that the drafter cannot propose; the last three are padding, which names row 0's element.
ROLLOUTS = {0: [0, 6, 7, 8, 9], 1: [1, 10], 3: [2, 11, 5, 12], 4: [3], 6: [4, *range(13, 20)]}


def rollouts() -> Rollouts:
    anchor, depth = torch.zeros(C, dtype=torch.long), torch.zeros(C, dtype=torch.long)
    for name, rows in ROLLOUTS.items():
        anchor[rows], depth[rows] = name, torch.arange(len(rows))
    return Rollouts(anchor, depth, 7, 8)


def row_losses(
    kind: LossKind, states: Tensor, tables: Tables, truth: Truth
) -> tuple[Tensor, Tensor]:
    """Loss and probability of acceptance [C] of each row."""
    log_q = F.log_softmax(states @ tables.draft.t(), -1)
    log_p = F.log_softmax(truth.states[truth.slots] @ tables.target.t(), -1)
    entropy = F.nll_loss(log_q, truth.labels, reduction="none")
    variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    if kind == "ce":
        return entropy, (-entropy).exp()
    if kind == "tv":
        return 0.9 * variation + 0.1 * entropy, 1 - variation
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1), 1 - variation


def at_once(
    kind: LossKind, states: Tensor, tables: Tables, truth: Truth, weights: Tensor
) -> Tensor:
    return (row_losses(kind, states, tables, truth)[0] * weights).sum()


def expected_drafts(acceptance: Tensor, weights: Tensor) -> Tensor:
    """E by its definition: draft k is accepted if it and all before it are."""
    total = acceptance.new_zeros(())
    for rows in ROLLOUTS.values():
        for end in range(1, len(rows) + 1):
            usable = bool((weights[rows[:end]] > 0).all())
            total = total + usable * weights[rows[end - 1]] * acceptance[rows[:end]].prod()
    return total


def acceptance_case() -> tuple[Tensor, Tensor, Tensor, Truth, Tensor]:
    states, draft, target, truth, weights = case()
    weights[5] = 0.0
    return states / 3, draft, target, truth, weights


@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
@pytest.mark.parametrize("chunk_rows", [5, 100])
@pytest.mark.parametrize("learn_table", [True, False])
def test_acceptance_weights_are_the_gradient_of_the_expected_acceptance_length(
    kind: LossKind, chunk_rows: int, learn_table: bool
) -> None:
    states, draft, target, truth, weights = acceptance_case()
    leaves = [states.requires_grad_(), draft.requires_grad_(learn_table)][: 1 + learn_table]
    tables = Tables(draft, target)
    losses, acceptance = row_losses(kind, states, tables, truth)
    p = acceptance.detach().requires_grad_()
    (slope,) = torch.autograd.grad(expected_drafts(p, weights), p)
    expected = (losses * (slope if kind == "tv" else slope * p.detach())).sum()
    chunked = ChunkedLoss(kind, chunk_rows, compiled=False, weighting="acceptance")
    ours = chunked(states, tables, truth, weights, rollouts()).loss
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-10)
    for mine, theirs in zip(
        torch.autograd.grad(3 * ours, leaves),
        torch.autograd.grad(3 * expected, leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


def test_a_step_down_weighted_cross_entropy_is_one_up_the_expected_acceptance_length() -> None:
    states, draft, target, truth, weights = acceptance_case()
    states.requires_grad_()
    tables = Tables(draft, target)
    expected = expected_drafts(row_losses("ce", states, tables, truth)[1], weights)
    chunked = ChunkedLoss("ce", 7, compiled=False, weighting="acceptance")
    loss = chunked(states, tables, truth, weights, rollouts()).loss
    (down,), (up,) = torch.autograd.grad(loss, states), torch.autograd.grad(expected, states)
    torch.testing.assert_close(down, -up, atol=1e-12, rtol=1e-10)
    assert up.abs().max() > 1e-4


def test_drawn_depths_give_the_gradient_of_whole_rollouts_on_average(tmp_path: Path) -> None:
    loss, cod = {"weighting": "acceptance", "depth_decay": 0.9}, {"retention": 0.6, "floor": 0.2}
    planner = build_planner(
        training.recipe(tmp_path, loss=loss, cod=cod), DEEP.head_config(max_speculative_tokens=5)
    )
    p, depth = torch.tensor([0.9, 0.5, 0.8, 0.7, 0.95]).double(), torch.arange(5)
    share = retentions(5, 0.6, 0.2)
    drawn_so_deep = share - F.pad(share[1:], (0, 1))  # [5]: exactly 1 .. 5 elements

    def values(count: int, weights: Tensor) -> Tensor:
        here = Rollouts(torch.zeros(count, dtype=torch.long), depth[:count], 1, 5)
        found = here.values(p[:count], weights[:count], of_log=True)
        return F.pad(found, (0, 5 - count))

    drawn = [values(count, planner.depth_weights.double()) for count in range(1, 6)]
    average = torch.einsum("c,ck->k", drawn_so_deep, torch.stack(drawn))
    torch.testing.assert_close(average, values(5, 0.9 ** depth.double()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 23, 100])
def test_chunks_change_neither_loss_nor_gradients(kind: LossKind, chunk_rows: int) -> None:
    states, draft, target, truth, weights = case()
    results = []
    for chunked in (True, False):
        leaves = [states.clone().requires_grad_(), draft.clone().requires_grad_()]
        tables = Tables(leaves[1], target)
        if chunked:
            output = ChunkedLoss(kind, chunk_rows, compiled=False)(
                leaves[0], tables, truth, weights, rollouts()
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
    for kind, expected in (
        ("kl", best == wanted),
        ("tv", best == wanted),
        ("ce", best == truth.labels),
    ):
        chunked = ChunkedLoss(kind, 5, compiled=False)
        output = chunked(states, Tables(draft, target), truth, weights, rollouts())
        assert torch.equal(output.matches, expected)


def test_a_frozen_table_gets_no_gradient() -> None:
    states, draft, target, truth, weights = case()
    states.requires_grad_()
    chunked = ChunkedLoss("kl", 5, compiled=False)
    output = chunked(states, Tables(draft, target), truth, weights, rollouts())
    output.loss.backward()
    assert states.grad is not None
    assert draft.grad is None

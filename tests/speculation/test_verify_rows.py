"""Properties of verification that hold for every row, whatever stands around it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.speculation.verify import PADDING, VerifyOutput, verify_coupled, verify_rejection

Batch = tuple[Tensor, ...]


@st.composite
def coupled_batches(draw) -> Batch:
    b, k, v = draw(st.integers(1, 5)), draw(st.integers(0, 5)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    target = torch.randint(v, (b, k + 1), generator=generator)
    drafts = torch.randint(v, (b, k), generator=generator)
    return target, drafts, torch.randint(k + 1, (b,), generator=generator)


@st.composite
def rejection_batches(draw) -> Batch:
    b, k, v = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def probs(depth: int) -> Tensor:
        weights = torch.randint(4, (b, depth, v), generator=generator).float()
        weights[..., 0] += weights.sum(-1) == 0
        return weights / weights.sum(-1, keepdim=True)

    drafts = torch.randint(v, (b, k), generator=generator)
    num_drafts = torch.randint(k + 1, (b,), generator=generator)
    uniforms = torch.rand(b, 2 * k + 1, generator=generator, dtype=torch.float64)
    return (
        probs(k + 1),
        probs(k),
        drafts,
        num_drafts,
        uniforms[:, :k],
        uniforms[:, k:],
    )


def slow_coupled(target: list[int], drafts: list[int], num_drafts: int) -> list[int]:
    committed: list[int] = []
    for draft, choice in zip(drafts[:num_drafts], target, strict=False):
        if draft != choice:
            break
        committed.append(draft)
    return [*committed, target[len(committed)]]


def slow_rejection(p, q, drafts, num_drafts, accept, again) -> list[int]:
    committed: list[int] = []
    weights = p[num_drafts]
    for depth in range(num_drafts):
        token = drafts[depth]
        if q[depth][token] > 0 and accept[depth] < p[depth][token] / q[depth][token]:
            committed.append(token)
            continue
        weights = [max(a - b, 0.0) for a, b in zip(p[depth], q[depth], strict=True)]
        if sum(weights) == 0:
            weights = p[depth]
        break
    left = again[len(committed)] * sum(weights)
    for token, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return [*committed, token]
    raise AssertionError("the uniform was not below 1")


def committed_rows(verified: VerifyOutput) -> list[list[int]]:
    counts = verified.num_accepted.tolist()
    return [ids[: n + 1] for ids, n in zip(verified.token_ids.tolist(), counts, strict=True)]


def rows_of(batch: Batch) -> list[list]:
    return [[part[row].tolist() for part in batch] for row in range(len(batch[0]))]


@given(coupled_batches())
@settings(max_examples=150)
def test_coupled_commits_what_a_plain_loop_commits(batch: Batch) -> None:
    assert committed_rows(verify_coupled(*batch)) == [slow_coupled(*row) for row in rows_of(batch)]


@given(rejection_batches())
@settings(max_examples=200)
def test_rejection_commits_what_a_plain_loop_commits(batch: Batch) -> None:
    expected = [slow_rejection(*row) for row in rows_of(batch)]
    assert committed_rows(verify_rejection(*batch)) == expected


@given(coupled_batches(), rejection_batches())
@settings(max_examples=100)
def test_drafts_come_first_then_one_bonus_then_padding(coupled: Batch, rejection: Batch) -> None:
    for verified, drafts, num_drafts in (
        (verify_coupled(*coupled), coupled[1], coupled[2]),
        (verify_rejection(*rejection), rejection[2], rejection[3]),
    ):
        assert verified.token_ids.dtype == verified.num_accepted.dtype == torch.int64
        assert verified.token_ids.shape == (len(drafts), drafts.shape[1] + 1)
        for row, count in enumerate(verified.num_accepted.tolist()):
            ids = verified.token_ids[row].tolist()
            assert 0 <= count <= num_drafts[row]
            assert ids[:count] == drafts[row, :count].tolist()
            assert ids[count] != PADDING
            assert ids[count + 1 :] == [PADDING] * (len(ids) - count - 1)


@given(coupled_batches())
@settings(max_examples=100)
def test_coupled_bonus_is_the_targets_and_differs_from_the_draft(batch: Batch) -> None:
    target, drafts, num_drafts = batch
    for row, committed in enumerate(committed_rows(verify_coupled(*batch))):
        depth = len(committed) - 1
        assert committed[depth] == target[row, depth]
        if depth < num_drafts[row]:
            assert committed[depth] != drafts[row, depth]


@given(st.data())
@settings(max_examples=80)
def test_a_verdict_does_not_depend_on_the_batch(data) -> None:
    for verify, batches in (
        (verify_coupled, coupled_batches()),
        (verify_rejection, rejection_batches()),
    ):
        batch = data.draw(batches)
        together = verify(*batch)
        for row in range(len(batch[0])):
            alone = verify(*(part[row : row + 1] for part in batch))
            assert torch.equal(alone.token_ids[0], together.token_ids[row])
            assert alone.num_accepted[0] == together.num_accepted[row]


def reject(p, q, draft: int, accept: float, again: float) -> tuple[int, int]:
    """Verifies one draft; returns (num_accepted, first committed token)."""
    verified = verify_rejection(
        torch.tensor([[p, p]]),
        torch.tensor([[q]]),
        torch.tensor([[draft]]),
        torch.tensor([1]),
        torch.tensor([[accept]], dtype=torch.float64),
        torch.tensor([[again, again]], dtype=torch.float64),
    )
    return int(verified.num_accepted), int(verified.token_ids[0, 0])


def test_a_token_the_target_rules_out_is_never_accepted() -> None:
    assert reject([1.0, 0.0], [0.0, 1.0], draft=1, accept=1e-300, again=0.999) == (0, 0)
    assert reject([1.0, 0.0], [0.0, 1.0], draft=1, accept=0.0, again=0.0) == (0, 0)


def test_a_draft_that_its_own_distribution_rules_out_is_rejected() -> None:
    assert reject([0.5, 0.5], [1.0, 0.0], draft=1, accept=1e-9, again=0.5) == (0, 1)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """p is below q everywhere by rounding alone, so nothing is left of p - q."""
    p, q = [0.49, 0.49, 0.0], [0.5, 0.5, 0.0]
    assert reject(p, q, draft=0, accept=0.99, again=0.45) == (0, 0)
    assert reject(p, q, draft=0, accept=0.99, again=0.55) == (0, 1)


@pytest.mark.parametrize("again", [1 - 2.0**-53, 1.0])
@pytest.mark.parametrize("p", [[0.1] * 10 + [0.0], [0.3, 0.3, 0.3, 0.0], [0.7, 0.7, 0.0]])
def test_the_largest_uniform_draws_the_last_token_that_has_weight(p, again: float) -> None:
    verified = verify_rejection(
        torch.tensor([[p]]),
        torch.empty(1, 0, len(p)),
        torch.empty(1, 0, dtype=torch.int64),
        torch.tensor([0]),
        torch.empty(1, 0),
        torch.tensor([[again]], dtype=torch.float64),
    )
    assert verified.token_ids.item() == len(p) - 2


def test_a_uniform_of_zero_draws_no_weightless_token() -> None:
    assert reject([0.0, 0.5, 0.5], [1.0, 0.0, 0.0], draft=0, accept=0.5, again=0.0) == (0, 1)


def test_a_uniform_between_two_tokens_draws_the_second() -> None:
    """Cells are half open, so that each is exactly as wide as its token is likely."""
    assert reject([0.25, 0.25, 0.5], [0.0, 0.0, 1.0], draft=2, accept=0.75, again=0.5) == (0, 1)


def test_a_uniform_at_the_threshold_of_acceptance_rejects() -> None:
    assert reject([0.5, 0.5], [1.0, 0.0], draft=0, accept=0.5, again=0.5) == (0, 1)

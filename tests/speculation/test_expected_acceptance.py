"""Closed forms of the acceptance probability against enumeration and against samples."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.speculation.acceptance import coupled_acceptance, rejection_acceptance
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import sample


def slow_coupled_acceptance(p: list[float], q: list[float]) -> float:
    """The V^2 form, term by term."""
    tokens = range(len(p))
    return sum(
        1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in tokens)
        for x in tokens
        if p[x] > 0 and q[x] > 0
    )


def probs(*weights: int) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@st.composite
def law_pairs(draw) -> tuple[Tensor, Tensor]:
    size = draw(st.integers(1, 7))
    weights = st.lists(st.integers(0, 5), min_size=size, max_size=size).filter(any)
    return probs(*draw(weights)), probs(*draw(weights))


@given(law_pairs())
@settings(max_examples=200)
def test_sorted_form_equals_the_quadratic_form(pair) -> None:
    p, q = pair
    expected = slow_coupled_acceptance(p.tolist(), q.tolist())
    assert math.isclose(float(coupled_acceptance(p, q)), expected, abs_tol=1e-12)


@given(law_pairs())
@settings(max_examples=100)
def test_coupling_keeps_at_most_what_rejection_keeps(pair) -> None:
    p, q = pair
    assert coupled_acceptance(p, q) <= rejection_acceptance(p, q) + 1e-12


def test_extremes() -> None:
    p, other = probs(1, 2, 3, 0), probs(0, 0, 0, 1)
    for acceptance in (coupled_acceptance, rejection_acceptance):
        assert math.isclose(float(acceptance(p, p)), 1.0)
        assert float(acceptance(p, other)) == 0.0
        assert math.isclose(float(acceptance(p, probs(0, 1, 0, 0))), 1 / 3)


def test_rejection_acceptance_is_the_overlap() -> None:
    assert math.isclose(float(rejection_acceptance(probs(1, 3), probs(3, 1))), 0.5)


def test_leading_dimensions_are_independent() -> None:
    logits = torch.randn(2, 3, 4, 500, generator=torch.Generator().manual_seed(0))
    p, q = (logits * 2).softmax(-1)
    together = coupled_acceptance(p, q)
    assert together.shape == (3, 4)
    assert together.dtype == torch.float64
    assert torch.allclose(together[1, 2], coupled_acceptance(p[1, 2], q[1, 2]), atol=1e-12)
    expected = slow_coupled_acceptance(p[1, 2].tolist(), q[1, 2].tolist())
    assert math.isclose(float(together[1, 2]), expected, abs_tol=1e-9)


def test_shared_noise_agrees_as_often_as_the_formula_says() -> None:
    p, q = probs(4, 3, 2, 1, 0), probs(1, 3, 1, 4, 3)
    n = 100_000
    noise = gumbel_noise(torch.full((n,), 77), torch.arange(n), 5)
    same = sample(p.log().float(), noise) == sample(q.log().float(), noise)
    expected = float(coupled_acceptance(p, q))
    assert abs(float(same.double().mean()) - expected) < 5 * math.sqrt(0.25 / n)

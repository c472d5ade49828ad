"""Chances given the target's token average to those of the two distributions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.speculation.acceptance import (
    coupled_acceptance,
    coupled_given_text,
    rejection_acceptance,
    rejection_given_text,
)

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=4, max_size=4).filter(any)


@pytest.mark.parametrize(
    ("given_text", "from_distributions"),
    [(rejection_given_text, rejection_acceptance), (coupled_given_text, coupled_acceptance)],
)
@given(WEIGHTS, WEIGHTS)
def test_the_mean_over_the_targets_tokens_is_the_acceptance_of_the_distributions(
    given_text: Callable[[Tensor, Tensor, Tensor], Tensor],
    from_distributions: Callable[[Tensor, Tensor], Tensor],
    first: list[float],
    second: list[float],
) -> None:
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (first, second))
    p, q = p / p.sum(), q / q.sum()
    tokens = torch.arange(len(p))
    chances = given_text(p.expand(len(p), -1), q.expand(len(p), -1), tokens)
    assert ((chances >= 0) & (chances <= 1 + 1e-12)).all()
    torch.testing.assert_close((p * chances).sum(), from_distributions(p, q))

"""AdamW as the recipe says it, and a learning rate that warms up, falls and ends where told."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from peagle.train.optimizer import build_optimizer, learning_rate_share, set_learning_rate
from peagle.train.recipe import OptimizerSection, ScheduleSection
from tests.tiny import training
from tests.tiny.models import DEEP

KINDS = ("linear", "cosine", "constant")


def schedule(kind: str, *, warmup: float = 0.1, final: float = 0.2) -> ScheduleSection:
    return ScheduleSection(kind=kind, warmup=warmup, final=final)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_rises_in_a_line_to_its_peak_at_the_end_of_warm_up(kind: str) -> None:
    shares = [learning_rate_share(schedule(kind), p) for p in (0.0, 0.025, 0.05, 0.1)]
    assert shares == pytest.approx([0.0, 0.25, 0.5, 1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_without_warm_up_a_run_starts_at_the_peak(kind: str) -> None:
    assert learning_rate_share(schedule(kind, warmup=0.0), 0.0) == 1.0


def test_a_cosine_falls_slowly_at_first_and_at_last() -> None:
    def share(progress: float) -> float:
        return learning_rate_share(schedule("cosine", warmup=0.2, final=0.1), progress)

    # A quarter, half and three quarters of the way from the end of warm-up to the end of the run.
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * x)) for x in (0.25, 0.5, 0.75)]
    assert [share(p) for p in (0.4, 0.6, 0.8)] == pytest.approx(expected)
    assert share(0.2) - share(0.3) < share(0.55) - share(0.65) > share(0.9) - share(1.0) > 0


def test_a_line_falls_evenly() -> None:
    shares = [learning_rate_share(schedule("linear", final=0.0), p) for p in (0.1, 0.4, 0.7, 1.0)]
    assert shares == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.02, 0.5])
def test_the_run_ends_at_its_final_share_and_stays_there(kind: str, final: float) -> None:
    for progress in (1.0, 1.1):  # a schedule by time may end a little late
        share = learning_rate_share(schedule(kind, final=final), progress)
        assert share == pytest.approx(final)


def test_a_constant_rate_stays_at_its_peak() -> None:
    assert {learning_rate_share(schedule("constant"), p) for p in (0.1, 0.5, 1.0)} == {1.0}


def test_matrices_decay_and_norms_and_mask_vectors_do_not() -> None:
    network = training.trainable_head(DEEP.make_target())
    optimizer = build_optimizer(network, OptimizerSection(weight_decay=0.3))
    decay = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    trained = dict(network.named_parameters())
    assert decay.keys() == set(trained.values())
    vectors = {name for name, p in trained.items() if decay[p] == 0.0}
    assert vectors == {name for name, p in trained.items() if p.dim() == 1}
    assert any("norm" in name for name in vectors)
    assert all(decay[p] == 0.3 for name, p in trained.items() if name not in vectors)


def test_frozen_weights_are_left_out() -> None:
    network = training.trainable_head(DEEP.make_target())
    network.fc.requires_grad_(False)
    optimizer = build_optimizer(network, OptimizerSection())
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(network.fc.weight) not in given


def test_two_steps_are_those_of_adamw_with_the_recipes_numbers() -> None:
    """By the definition: moments with their betas, bias corrected, eps, decay beside them."""
    options = OptimizerSection(learning_rate=0.1, weight_decay=0.5, betas=(0.6, 0.8), eps=0.01)
    module = nn.Linear(1, 1).double()
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(2.0)
    optimizer = build_optimizer(module, options)
    for gradient in (1.0, -3.0):
        for p in module.parameters():
            p.grad = torch.full_like(p, gradient)
        optimizer.step()
    expected = {"weight": 2.0, "bias": 2.0}
    first = second = 0.0
    for step, gradient in enumerate((1.0, -3.0), start=1):
        first = 0.6 * first + 0.4 * gradient
        second = 0.8 * second + 0.2 * gradient**2
        update = (first / (1 - 0.6**step)) / (math.sqrt(second / (1 - 0.8**step)) + 0.01)
        expected["weight"] *= 1 - 0.1 * 0.5
        expected = {name: value - 0.1 * update for name, value in expected.items()}
    found = {name: p.item() for name, p in module.named_parameters()}
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_new_rate_reaches_every_group() -> None:
    optimizer = build_optimizer(training.trainable_head(DEEP.make_target()), OptimizerSection())
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]

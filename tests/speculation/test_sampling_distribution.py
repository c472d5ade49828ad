"""The filtered distribution equals a slow one; what is drawn follows it; rows stand alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.speculation import sampling
from peagle.speculation.noise import gumbel_noise
from peagle.speculation.sampling import (
    SamplingRows,
    apply_penalties,
    filter_logits,
    greedy,
    nan_rows,
    probabilities,
    sample,
)
from tests.tolerance import near, rounding

INF = math.inf
NEAR = rounding(terms=12)  # float32 may decide either way when a threshold is nearer than this


def make_rows(*settings_: tuple[float, int, float, float]) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*settings_, strict=True)
    floats = [torch.tensor(column, dtype=torch.float32) for column in (temperature, top_p, min_p)]
    return SamplingRows(floats[0], torch.tensor(top_k), floats[1], floats[2])


def softmax(logits: list[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    return [w / sum(weights) for w in weights]


def slow_probs(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float):
    """Temperature, min-p, top-k, top-p in float64; skips examples too near to a threshold."""
    logits = [x / temperature for x in logits]
    probs = softmax(logits)
    assume(all(p == 0 or abs(p / max(probs) - min_p) > NEAR for p in probs) or min_p in (0, 1))
    logits = [-INF if p < min_p * max(probs) else x for x, p in zip(logits, probs, strict=True)]
    if 0 < top_k < len(logits):
        threshold = sorted(logits, reverse=True)[top_k - 1]
        logits = [-INF if x < threshold else x for x in logits]
    if top_p < 1:
        logits = slow_top_p(logits, top_p)
    return softmax(logits)


def slow_top_p(logits: list[float], top_p: float) -> list[float]:
    probs, mass, kept = softmax(logits), 0.0, set()
    for token in sorted(range(len(logits)), key=lambda x: (-logits[x], x)):
        assume(abs(mass - top_p) > NEAR)
        if mass >= top_p:
            break
        kept.add(token)
        mass += probs[token]
    return [x if token in kept else -INF for token, x in enumerate(logits)]


# Quarters make ties frequent, as bfloat16 logits do.
LOGITS = st.lists(
    st.one_of(st.integers(-16, 16).map(lambda x: x / 4), st.just(-INF)), min_size=2, max_size=12
).filter(lambda row: max(row) > -INF)
SETTINGS = st.tuples(
    st.sampled_from([0.25, 0.5, 1.0, 2.0]),
    st.integers(0, 14),
    st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.8, 0.93, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.9, 1.0]),
)


def assert_distribution(actual: Tensor, expected: list[float]) -> None:
    assert [p > 0 for p in actual.tolist()] == [p > 1e-30 for p in expected]
    torch.testing.assert_close(actual, torch.tensor(expected), **near(terms=12))


@pytest.mark.slow
@given(LOGITS, SETTINGS)
@settings(max_examples=400)
def test_filtered_distribution_equals_the_slow_one(logits: list[float], setting) -> None:
    expected = slow_probs(logits, *setting)
    filtered = filter_logits(torch.tensor([logits]), make_rows(setting))
    assert_distribution(probabilities(filtered)[0], expected)


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ((1.0, 0, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((1.0, 2, 1.0, 0.0), {1, 2, 3}),  # 2 and 3 tie at the threshold: both stay
        ((1.0, 3, 1.0, 0.0), {1, 2, 3}),
        ((1.0, 1, 1.0, 0.0), {1}),
        ((1.0, 99, 1.0, 0.0), {0, 1, 2, 3, 4}),
        ((1.0, 0, 0.45, 0.0), {1, 2}),  # 0.4 is short of it; of the tied 2 and 3 the lower id
        ((1.0, 0, 0.39, 0.0), {1}),
        ((1.0, 0, 1e-9, 0.0), {1}),
        ((1.0, 0, 0.85, 0.0), {0, 1, 2, 3}),
        ((1.0, 0, 1.0, 0.4), {1, 2, 3}),  # at least 0.16
        ((1.0, 0, 1.0, 1.0), {1}),
        ((1.0, 1, 0.5, 0.0), {1}),
        ((1.0, 2, 0.45, 0.0), {1}),  # top-p on what top-k left: 0.5 reaches 0.45
        ((1.0, 0, 0.45, 0.4), {1}),  # and on what min-p left
    ],
)
def test_each_filter_keeps_what_it_should(setting, kept: set[int]) -> None:
    logits = torch.tensor([[0.14, 0.4, 0.2, 0.2, 0.06]]).log()
    filtered = filter_logits(logits, make_rows(setting))
    assert set(filtered[0].isfinite().nonzero().flatten().tolist()) == kept


def test_temperature_scales_before_the_filters() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    hot, cold = (filter_logits(logits, make_rows((t, 0, 0.6, 0.0))) for t in (1.0, 0.25))
    assert hot[0].isfinite().tolist() == [True, True, False]
    assert cold[0].isfinite().tolist() == [True, False, False]


@given(st.lists(SETTINGS, min_size=2, max_size=6), st.integers(0, 2**32))
@settings(max_examples=60)
def test_a_row_does_not_depend_on_its_neighbours(row_settings, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(row_settings), 700, generator=generator).mul(8).round().div(4)
    together = filter_logits(logits, make_rows(*row_settings))
    for row, setting in enumerate(row_settings):
        alone = filter_logits(logits[row : row + 1], make_rows(setting))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 6.0])
def test_the_quick_nucleus_equals_the_whole_one(scale: float) -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)).mul(scale)
    logits[3:] = logits[3:].bfloat16().float()  # many ties
    top_p = torch.tensor([0.1, 0.5, 0.9, 0.3, 0.9, 0.999])
    whole = sampling._keep_top_p(logits, top_p, candidates=3000)
    for candidates in (1, 7, 512):
        assert torch.equal(sampling._keep_top_p(logits, top_p, candidates), whole)


@pytest.mark.parametrize(
    ("vocab_size", "top_p", "kept"),
    [(2000, 0.75, 1500), (1024, 0.5, 512), (600, 0.9999, 600), (512, 0.9999, 512)],
)
def test_a_wide_nucleus_is_found_whole(vocab_size: int, top_p: float, kept: int) -> None:
    filtered = filter_logits(torch.zeros(1, vocab_size), make_rows((1.0, 0, top_p, 0.0)))
    assert filtered[0].isfinite().tolist() == [True] * kept + [False] * (vocab_size - kept)


def test_a_top_p_of_one_drops_nothing_however_unlikely() -> None:
    logits = torch.tensor([[0.0, -60.0]])
    assert torch.equal(filter_logits(logits, make_rows((1.0, 0, 1.0, 0.0))), logits)


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(3, 600)
    before = logits.clone()
    filtered = filter_logits(logits, make_rows(*[(1.0, 5, 0.5, 0.1)] * 3))
    sample(filtered, torch.zeros_like(filtered))
    ones = torch.ones(3)
    apply_penalties(logits, logits > 0, (logits > 1).int(), ones * 2, ones, ones)
    assert torch.equal(logits, before)


# --- penalties


@given(LOGITS, st.data())
@settings(max_examples=150)
def test_penalties_equal_the_slow_ones(logits: list[float], data) -> None:
    size = len(logits)
    prompt = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    counts = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    penalty = st.sampled_from([-2.0, -0.5, 0.0, 0.7, 2.0])
    repetition = data.draw(st.sampled_from([0.5, 1.0, 1.3, 2.0]))
    presence, frequency = data.draw(penalty), data.draw(penalty)
    expected = []
    for x, in_prompt, count in zip(logits, prompt, counts, strict=True):
        if in_prompt or count:
            x = x / repetition if x > 0 else x * repetition
        expected.append(x - frequency * count - (presence if count else 0.0))
    actual = apply_penalties(
        torch.tensor([logits]),
        torch.tensor([prompt]),
        torch.tensor([counts]),
        torch.tensor([repetition]),
        torch.tensor([presence]),
        torch.tensor([frequency]),
    )
    torch.testing.assert_close(actual[0], torch.tensor(expected), **near(10.0, terms=4))


def test_penalties_are_taken_per_row() -> None:
    logits, seen = torch.tensor([[2.0, -2.0]] * 2), torch.ones(2, 2, dtype=torch.bool)
    off, none = torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)
    actual = apply_penalties(logits, seen, none, torch.tensor([1.0, 2.0]), off, off)
    assert actual.tolist() == [[2.0, -2.0], [1.0, -4.0]]


# --- drawing

MODES = {
    "unfiltered": (1.0, 0, 1.0, 0.0),
    "hot": (2.0, 0, 1.0, 0.0),
    "top_k": (1.0, 3, 1.0, 0.0),
    "top_p": (0.7, 0, 0.8, 0.0),
    "min_p": (1.3, 0, 1.0, 0.2),
    "all": (0.9, 5, 0.9, 0.05),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("penalised", [False, True])
def test_what_is_drawn_follows_the_distribution(mode: str, penalised: bool) -> None:
    n, v = 60_000, 8
    logits = torch.tensor([[1.5, 0.3, -0.5, 2.0, -INF, 1.0, 0.9, -2.0]])
    if penalised:  # and biased, as logit_bias does it: added before the penalties
        bias = torch.tensor([0.0, 1.5, 0.0, -1.0, 0.0, 0.0, 0.0, 2.5])
        counts = torch.tensor([[2, 0, 0, 1, 0, 0, 0, 0]])
        one = torch.ones(1)
        logits = apply_penalties(logits + bias, counts > 1, counts, 1.2 * one, 0.3 * one, 0.2 * one)
    filtered = filter_logits(logits, make_rows(MODES[mode]))
    noise = gumbel_noise(torch.full((n,), 2024), torch.arange(n), v)
    counts = torch.bincount(sample(filtered.expand(n, v), noise), minlength=v).double()
    probs = probabilities(filtered)[0].double()
    assert (counts[probs == 0] == 0).all()
    sigma = (n * probs * (1 - probs)).sqrt()
    assert ((counts - n * probs).abs() <= 5 * sigma).all()


def test_large_logits_do_not_round_the_noise_away() -> None:
    n = 20_000
    noise = gumbel_noise(torch.arange(n), torch.zeros(n, dtype=torch.int64), 2)
    tokens = sample(torch.full((n, 2), 3e8), noise)
    assert abs(float(tokens.double().mean()) - 0.5) < 5 * math.sqrt(0.25 / n)


def test_a_dropped_token_is_never_drawn() -> None:
    filtered = torch.tensor([[-INF, -1e30, -INF]])
    assert sample(filtered, torch.tensor([[20.0, -20.0, 20.0]])).tolist() == [1]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.full((3, 5000), -1.0)
    logits[0, [7, 4000]] = 2.0
    logits[1, 4999] = 2.0
    for dtype in (torch.float32, torch.bfloat16):
        assert greedy(logits.to(dtype)).tolist() == [7, 4999, 0]


def test_rows_that_cannot_be_sampled_are_found() -> None:
    nan = math.nan
    logits = [[0.0, nan], [nan, -INF], [INF, 0.0], [-INF, -INF], [0.0, -INF], [1.0, 2.0]]
    assert nan_rows(torch.tensor(logits)).tolist() == [True, True, True, True, False, False]

"""Tokens found without logits are those that the logits would have given.

Whole numbers make sums exact in any order, and ties frequent: there nothing may differ.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu import best_token as fast
from peagle.kernels.gpu.best_token import LinearTile
from peagle.kernels.reference import best_token as reference
from peagle.kernels.reference.sampling import SampledTokens

INF, NAN = math.inf, math.nan
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LinearTile(16, 16, 16, warps=4, stages=2)  # several of them even in a tiny table
FORMS = [
    LinearTile(128, 128, 64, warps=4, stages=3),
    LinearTile(128, 128, 64, warps=8, stages=3),
    LinearTile(128, 256, 64, warps=8, stages=4),
    LinearTile(256, 128, 64, warps=8, stages=3),
    LinearTile(64, 256, 64, warps=4, stages=3),
]
NEAR_TIE = 1e-4  # float32 sums of 576 products around 1 in two orders


def whole_numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(DEVICE, dtype)


def random_product(rows: int, vocab_size: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(vocab_size, inputs, generator=generator) / math.sqrt(inputs)
    return hidden.to(DEVICE, torch.bfloat16), weight.to(DEVICE, torch.bfloat16)


def assert_equal(actual: SampledTokens, expected: SampledTokens) -> None:
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.usable.tolist() == expected.usable.tolist()


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 9))
@settings(max_examples=200 if DEVICE == "cuda" else 8)
def test_any_sizes_give_the_tokens_of_the_definition(rows, vocab_size, inputs, with_ids, seed):
    hidden = whole_numbers(rows, inputs, seed=seed)
    weight = whole_numbers(vocab_size, inputs, seed=seed + 1)
    ids = torch.arange(vocab_size, device=DEVICE) * 3 + 5 if with_ids else None
    actual = fast.best_tokens_in_tiles(hidden, weight, ids, SMALL)
    assert_equal(actual, reference.best_tokens(hidden, weight, ids))


def test_the_lowest_id_wins_among_equals_within_and_across_tiles() -> None:
    """Row r's logits are column r of the table."""
    weight = torch.full((70, 16), -1.0, device=DEVICE, dtype=torch.float16)
    weight[[19, 21, 69], 0] = 2.0
    weight[[15, 16], 1] = 2.0
    weight[69, 2] = 2.0
    hidden = torch.eye(16, device=DEVICE, dtype=torch.float16)[:4]
    best = fast.best_tokens_in_tiles(hidden, weight, None, SMALL)
    assert best.token_ids.tolist() == [19, 15, 69, 0]
    assert best.usable.all()


def test_sums_are_compared_unrounded() -> None:
    """2048 and 2049 are the same float16."""
    weight = torch.zeros(20, 16, device=DEVICE, dtype=torch.float16)
    weight[:, 0], weight[17, 1] = 2048.0, 1.0
    hidden = torch.ones(1, 16, device=DEVICE, dtype=torch.float16)
    assert fast.best_tokens_in_tiles(hidden, weight, None, SMALL).token_ids.tolist() == [17]


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("vocab_size", [32, 37])
def test_rows_that_admit_no_token_are_reported(with_ids: bool, vocab_size: int) -> None:
    """A NaN beside a zero is a NaN, so rows are broken by their own hidden states."""
    weight = whole_numbers(vocab_size, 16).abs() + 1
    hidden = torch.zeros(6, 16, device=DEVICE, dtype=torch.float16)
    hidden[0, 3], hidden[1, 3], hidden[2, 3] = NAN, INF, -INF
    hidden[3, 0], hidden[4, :2] = 1.0, torch.tensor([INF, -INF])
    ids = torch.arange(vocab_size, device=DEVICE) + 9 if with_ids else None
    actual = fast.best_tokens_in_tiles(hidden, weight, ids, SMALL)
    assert actual.usable.tolist() == [False, False, False, True, False, True]
    assert_equal(actual, reference.best_tokens(hidden, weight, ids))


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [0, 15, 16, 35])
def test_one_broken_logit_is_seen_wherever_it_stands(value: float, column: int) -> None:
    """Of two rows that are otherwise alike, one reads the broken number."""
    weight = whole_numbers(36, 16)
    weight[:, 15] = 0.0
    weight[column, 15] = value
    hidden = whole_numbers(1, 16).repeat(2, 1)
    hidden[:, 15] = torch.tensor([1.0, 0.0])
    actual = fast.best_tokens_in_tiles(hidden, weight, None, SMALL)
    assert_equal(actual, reference.best_tokens(hidden, weight, None))
    assert actual.usable.tolist() == [value == -INF, False]  # a zero times these is a NaN


def test_a_table_of_infinities_leaves_the_tokens_that_can_be_sampled() -> None:
    """Whole tiles of -inf, and a row of nothing else."""
    weight = torch.full((50, 16), -INF, device=DEVICE, dtype=torch.float16)
    weight[33] = 1.0
    hidden = torch.ones(2, 16, device=DEVICE, dtype=torch.float16)
    assert fast.best_tokens_in_tiles(hidden, weight, None, SMALL).token_ids.tolist() == [33, 33]
    weight[33] = -INF
    assert not fast.best_tokens_in_tiles(hidden, weight, None, SMALL).usable.any()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    hidden, weight = whole_numbers(20, 24), whole_numbers(40, 24, seed=1)
    alone = fast.best_tokens_in_tiles(hidden[3:4], weight, None, SMALL).token_ids.tolist()
    hidden[:3], hidden[4:] = NAN, INF
    assert fast.best_tokens_in_tiles(hidden, weight, None, SMALL).token_ids[3:4].tolist() == alone


# --- real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("block", FORMS)
@pytest.mark.parametrize(("rows", "vocab_size"), [(100, 24_576), (896, 24_576), (1024, 49_152)])
def test_real_sizes_give_the_tokens_of_the_definition(rows, vocab_size, block: LinearTile) -> None:
    hidden = whole_numbers(rows, 576, dtype=torch.bfloat16)
    weight = whole_numbers(vocab_size, 576, seed=1, dtype=torch.bfloat16)
    ids = torch.arange(vocab_size, device=DEVICE) * 2
    actual = fast.best_tokens_in_tiles(hidden, weight, ids, block)
    assert_equal(actual, reference.best_tokens(hidden, weight, ids))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs"), [(65, 576), (128, 576), (1000, 576), (300, 4096)])
def test_bfloat16_tokens_are_those_of_cublas_up_to_near_ties(rows: int, inputs: int) -> None:
    hidden, weight = random_product(rows, 49_152, inputs)
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    best = fast.best_tokens(hidden, weight, None)
    gaps = logits.amax(1) - logits.gather(1, best.token_ids[:, None])[:, 0]
    assert best.usable.all()
    assert float(gaps.max()) < NEAR_TIE


@pytest.mark.gpu
def test_best_tokens_can_be_captured_in_a_cuda_graph() -> None:
    hidden, weight = random_product(300, 49_152, 576)
    fast.best_tokens(hidden, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast.best_tokens(hidden, weight, None)
    hidden.copy_(hidden.roll(1, 0))
    graph.replay()
    assert_equal(captured, fast.best_tokens(hidden, weight, None))

"""Rejection by kernels: the definition's tokens, and the target's distribution by enumeration."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu.rejection import rejection_uniforms as uniforms_fast
from peagle.kernels.gpu.rejection import verify_in_chunks
from peagle.kernels.gpu.rejection import verify_rejection as verify_fast
from peagle.kernels.reference.rejection import rejection_uniforms, verify_rejection
from peagle.speculation.noise import stream_uniform
from peagle.speculation.verify import VerifyOutput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 16
EXAMPLES = 200 if DEVICE == "cuda" else 6

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def random_case(
    batch: int, depth: int, vocab_size: int, seed: int, likeness: float = 0.7, zeros: float = 0.3
) -> Case:
    """Distributions with zeros, drafts drawn from theirs, padding past `num_drafts`."""
    generator = torch.Generator().manual_seed(seed)

    def distribution(*logits: Tensor) -> Tensor:
        x = sum(logits)
        dropped = torch.rand(x.shape, generator=generator) < zeros
        dropped.scatter_(-1, x.argmax(-1, keepdim=True), False)
        return x.masked_fill(dropped, -math.inf).softmax(-1)

    common = torch.randn(batch, depth + 1, vocab_size, generator=generator) * 2
    own = torch.randn(batch, depth + 1, vocab_size, generator=generator)
    p, q = distribution(common), distribution(common * likeness, own)[:, :-1]
    tokens = torch.zeros(batch, depth, dtype=torch.int64)
    if depth:
        drawn = q.reshape(-1, vocab_size).multinomial(1, generator=generator)
        tokens = drawn.view(batch, depth)
    num_drafts = torch.randint(0, depth + 1, (batch,), generator=generator)
    tokens[torch.arange(depth) >= num_drafts.unsqueeze(1)] = -1
    uniforms = torch.rand(2, batch, depth + 1, generator=generator, dtype=torch.float64)
    case = p, q, tokens, num_drafts, uniforms[0, :, :-1], uniforms[1]
    return tuple(x.to(DEVICE) for x in case)  # type: ignore[return-value]


def assert_same_output(case: Case, chunk: int = CHUNK) -> VerifyOutput:
    expected, actual = verify_rejection(*case), verify_in_chunks(*case, chunk)
    assert actual.num_accepted.tolist() == expected.num_accepted.tolist()
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    return actual


@given(st.integers(0, 4), st.sampled_from([3, 16, 40]), st.integers(0, 2**32))
@settings(max_examples=EXAMPLES)
def test_outputs_equal_those_of_the_definition(depth: int, vocab_size: int, seed: int) -> None:
    assert_same_output(random_case(3, depth, vocab_size, seed))


def test_a_drafter_that_is_the_target_is_accepted_whole() -> None:
    p, _, tokens, num_drafts, *uniforms = random_case(4, 3, 40, seed=5)
    tokens = p[:, :-1].argmax(-1)
    case = p, p[:, :-1].contiguous(), tokens, torch.full_like(num_drafts, 3), *uniforms
    assert assert_same_output(case).num_accepted.tolist() == [3] * 4


def test_a_draft_that_its_own_distribution_rules_out_is_rejected() -> None:
    p, q, _, num_drafts, *uniforms = random_case(3, 1, 40, seed=8)
    p[:, 0, 7], q[:, 0, 7] = 0.5, 0.0
    tokens = torch.full((3, 1), 7, device=DEVICE)
    case = p, q, tokens, torch.ones_like(num_drafts), *uniforms
    assert assert_same_output(case).num_accepted.tolist() == [0] * 3


def test_padding_and_what_lies_behind_the_drafts_are_never_read() -> None:
    p, q, tokens, num_drafts, *uniforms = random_case(4, 3, 40, seed=6)
    num_drafts = torch.tensor([0, 1, 2, 1], device=DEVICE)
    tokens = q.argmax(-1)
    expected = verify_rejection(p, q, tokens, num_drafts, *uniforms)
    p, q = p.clone(), q.clone()
    for row, count in enumerate(num_drafts.tolist()):
        q[row, count:], p[row, count + 1 :], tokens[row, count:] = math.nan, math.nan, -1
    actual = verify_in_chunks(p, q, tokens, num_drafts, *uniforms, CHUNK)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
def test_the_bonus_token_always_has_weight(uniform: float) -> None:
    """At both ends of (0, 1), with zeros at both ends of the row and whole chunks of them."""
    p = torch.zeros(2, 2, 70, device=DEVICE)
    p[:, :, [20, 33, 50]] = torch.tensor([0.1, 0.7, 0.2], device=DEVICE)
    q = torch.zeros(2, 1, 70, device=DEVICE)
    q[:, :, 33] = 1.0
    tokens = torch.full((2, 1), 33, device=DEVICE)
    accept = torch.tensor([[0.99], [0.0]], device=DEVICE, dtype=torch.float64)
    residual = torch.full((2, 2), uniform, device=DEVICE, dtype=torch.float64)
    num_drafts = torch.ones(2, dtype=torch.int64, device=DEVICE)
    verified = assert_same_output((p, q, tokens, num_drafts, accept, residual))
    assert verified.num_accepted.tolist() == [0, 1]
    assert verified.token_ids[0, 0].item() in (20, 50)  # 33 is not in the residual
    assert verified.token_ids[1, 1].item() in (20, 33, 50)


def test_p_is_drawn_from_where_rounding_leaves_nothing_of_the_residual() -> None:
    """A uniform is never 1; here it stands for a rejection by rounding where p equals q."""
    p = torch.full((1, 2, 40), 1 / 40, device=DEVICE)
    tokens = torch.tensor([[3]], device=DEVICE)
    uniforms = torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
    residual = torch.full((1, 2), 0.51, dtype=torch.float64, device=DEVICE)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    verified = assert_same_output((p, p[:, :1], tokens, one, uniforms, residual))
    assert verified.token_ids.tolist() == [[20, -1]]


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    case = random_case(4, 2, 40, seed=9)
    together = verify_in_chunks(*case, CHUNK)
    for row in range(4):
        alone = verify_in_chunks(*(x[row : row + 1] for x in case), CHUNK)  # type: ignore[arg-type]
        assert alone.token_ids[0].tolist() == together.token_ids[row].tolist()


@pytest.mark.parametrize("depth", [0, 1, 4, 7])
def test_uniforms_have_the_bits_of_the_definition(depth: int) -> None:
    seeds = torch.tensor([0, -1, 1 << 40, -(1 << 63), (1 << 63) - 1], device=DEVICE)
    outputs = torch.tensor([0, 7, 100_000, 3, 1 << 33], device=DEVICE)
    ours, theirs = (m(seeds, outputs, depth) for m in (uniforms_fast, rejection_uniforms))
    assert ours.accept.shape == (5, depth)
    assert torch.equal(ours.accept, theirs.accept)
    assert torch.equal(ours.residual, theirs.residual)
    for number in range(depth + 1):  # stream 0 accepts, 1 draws again
        assert torch.equal(theirs.residual[:, number], stream_uniform(seeds, outputs + number, 1))
    for number in range(depth):
        assert torch.equal(theirs.accept[:, number], stream_uniform(seeds, outputs + number, 0))


# --- the distribution, enumerated


def counts(seed: int, prefix: tuple[int, ...], vocab_size: int, units: int) -> list[int]:
    """A next-token distribution in whole units, zeros included."""
    rng = random.Random(f"{seed} {prefix}")
    draws = Counter(rng.randrange(vocab_size) for _ in range(units))
    return [draws[token] for token in range(vocab_size)]


def prob(seed: int, sequence: tuple[int, ...], vocab_size: int, units: int) -> Fraction:
    weight = Fraction(1)
    for depth, token in enumerate(sequence):
        weight *= Fraction(counts(seed, sequence[:depth], vocab_size, units)[token], units)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "vocab_size", "units", "depth", "num_uniforms"),
    [(0, 3, 3, 1, 6), (0, 5, 2, 1, 2), (1, 5, 2, 1, 2), (0, 3, 2, 2, 2), (1, 3, 2, 2, 2)],
)
def test_output_has_the_targets_distribution(
    seed: int, vocab_size: int, units: int, depth: int, num_uniforms: int
) -> None:
    """Over all drafts and a grid of uniforms fine enough for every ratio of units, one call."""
    seeds = {"target": seed, "drafter": seed + 100}
    grid = [(i + 0.5) / num_uniforms for i in range(num_uniforms)]
    drafts = [
        (tokens, weight)
        for tokens in product(range(vocab_size), repeat=depth)
        if (weight := prob(seeds["drafter"], tokens, vocab_size, units))
    ]
    uniforms = list(product(grid, repeat=depth + 1))
    rows = [
        (tokens, weight / len(uniforms), uniform)
        for tokens, weight in drafts
        for uniform in uniforms
    ]

    def tensor(model: str, length: int) -> Tensor:
        table = [
            [counts(seeds[model], tokens[:i], vocab_size, units) for i in range(length)]
            for tokens, _, _ in rows
        ]
        return torch.tensor(table, dtype=torch.float64, device=DEVICE) / units

    uniform_table = torch.tensor(
        [uniform for _, _, uniform in rows], dtype=torch.float64, device=DEVICE
    )
    verified = verify_in_chunks(
        tensor("target", depth + 1),
        tensor("drafter", depth),
        torch.tensor([tokens for tokens, _, _ in rows], device=DEVICE),
        torch.full((len(rows),), depth, device=DEVICE),
        uniform_table[:, :depth],
        uniform_table[:, -1:].expand(-1, depth + 1),
        2,
    )
    # A shorter output is continued by the target's own distribution.
    total: Counter[tuple[int, ...]] = Counter()
    outputs = zip(rows, verified.token_ids.tolist(), verified.num_accepted.tolist(), strict=True)
    for (_, weight, _), ids, accepted in outputs:
        committed = tuple(ids[: accepted + 1])
        for rest in product(range(vocab_size), repeat=depth - accepted):
            whole = committed + rest
            before = prob(seeds["target"], committed, vocab_size, units)
            total[whole] += weight * prob(seeds["target"], whole, vocab_size, units) / before
    for sequence in product(range(vocab_size), repeat=depth + 1):
        assert total[sequence] == prob(seeds["target"], sequence, vocab_size, units)


# --- real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_a_real_vocabulary_is_verified_as_on_the_cpu(batch: int) -> None:
    case = random_case(batch, 7, 49_152, seed=batch)
    expected = verify_rejection(*(x.cpu() for x in case))
    actual = verify_fast(*case)
    assert actual.num_accepted.tolist() == expected.num_accepted.tolist()
    assert actual.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.gpu
def test_verification_can_be_captured_in_a_cuda_graph() -> None:
    case = random_case(4, 5, 49_152, seed=3)
    eager = verify_fast(*case)
    seeds, outputs = torch.arange(8, device=DEVICE).view(2, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = verify_fast(*case)
        uniforms = uniforms_fast(seeds, outputs, 5)
    outputs += 3
    graph.replay()
    assert torch.equal(captured.token_ids, eager.token_ids)
    assert torch.equal(uniforms.residual, rejection_uniforms(seeds, outputs, 5).residual)

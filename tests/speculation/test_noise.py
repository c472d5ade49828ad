"""Noise is a hash: the same anywhere, uniform, and without visible structure."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peagle.speculation import noise
from peagle.speculation.noise import derive_seed, gumbel_noise, stream_uniform, uniform_noise
from tests.tolerance import near

SIGMAS = 5.5  # fixed inputs: a bound this wide fails only if the hash is bad


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def assert_uniform(u: Tensor, bins: int = 64) -> None:
    counts = torch.histc(u.double(), bins, 0.0, 1.0)
    expected = u.numel() / bins
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < SIGMAS * math.sqrt(2 * (bins - 1))


def assert_uncorrelated(a: Tensor, b: Tensor) -> None:
    """Values, and their last bits, of two equally shaped draws have no linear relation."""
    for transform in (lambda u: u - 0.5, lambda u: (u * 4096) % 1 - 0.5):
        x, y = transform(a.double()).flatten(), transform(b.double()).flatten()
        z = float((x * y).mean() / math.sqrt(1 / 144 / x.numel()))
        assert abs(z) < SIGMAS


def test_values_never_change() -> None:
    """A seed's tokens are part of the interface: these constants may not move."""
    u = uniform_noise(ints(0, -1, 1 << 40), ints(0, 7, 100_000), 3)
    pinned = [
        [0.13459791243076324, 0.7573205828666687, 0.5603206157684326],
        [0.6417444348335266, 0.2916555404663086, 0.9358364939689636],
        [0.7644109129905701, 0.22905753552913666, 0.20970115065574646],
    ]
    assert u.tolist() == pinned
    assert stream_uniform(ints(5), ints(9), 1).item() == 0.26524721140499696
    assert derive_seed(1234, 3) == -946299435521917831


def test_gumbel_is_the_double_log_of_the_uniform() -> None:
    args = ints(3, 4), ints(5, 6), 1000
    u = uniform_noise(*args).double()
    expected = -torch.log(-torch.log1p(-u))
    torch.testing.assert_close(gumbel_noise(*args).double(), expected, **near(terms=1))


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4099])
@pytest.mark.parametrize("draw", [uniform_noise, gumbel_noise])
def test_a_row_does_not_depend_on_its_neighbours(draw, vocab_size: int) -> None:
    seeds, positions = torch.arange(9) * 1_000_003, torch.arange(9) % 4
    together = draw(seeds, positions, vocab_size)
    for row in range(9):
        alone = draw(seeds[row : row + 1], positions[row : row + 1], vocab_size)
        assert torch.equal(together[row], alone[0])


def test_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    assert torch.equal(
        uniform_noise(ints(1), ints(2), 500)[:, :100], uniform_noise(ints(1), ints(2), 100)
    )


def test_inputs_are_left_alone() -> None:
    seeds, positions = ints(1, 2), ints(3, 4)
    gumbel_noise(seeds, positions, 5)
    stream_uniform(seeds, positions, 0)
    assert seeds.tolist() == [1, 2]
    assert positions.tolist() == [3, 4]


@pytest.mark.parametrize("bits", [0, 1, 0x7FFFFF00, 0x7FFFFFFF])
def test_the_interval_is_open_and_gumbels_are_finite(monkeypatch, bits: int) -> None:
    monkeypatch.setattr(noise, "_vocab_bits", lambda *_: torch.full((1, 1), bits).int())
    u = uniform_noise(ints(0), ints(0), 1)
    assert 0.0 < u.item() < 1.0
    assert gumbel_noise(ints(0), ints(0), 1).isfinite().all()


def test_the_stream_interval_is_open(monkeypatch) -> None:
    for key in (0, -1):
        monkeypatch.setattr(noise, "_row_keys", lambda *_, key=key: ints(key))
        assert 0.0 < stream_uniform(ints(0), ints(0), 0).item() < 1.0


def test_uniform_over_tokens_positions_and_seeds() -> None:
    zeros, many = torch.zeros(40_000, dtype=torch.int64), torch.arange(40_000)
    assert_uniform(uniform_noise(ints(0), ints(0), 40_000))
    assert_uniform(uniform_noise(zeros, many, 1))
    assert_uniform(uniform_noise(many, zeros, 1))
    assert_uniform(uniform_noise(many << 32, zeros, 1))
    assert_uniform(uniform_noise(torch.arange(200), torch.arange(200), 200))
    assert_uniform(stream_uniform(many, zeros, 0))
    assert_uniform(stream_uniform(zeros, many, 1))


def test_small_uniforms_are_as_frequent_as_they_should_be() -> None:
    """The tail that decides which unlikely token is sampled."""
    u = uniform_noise(torch.zeros(64, dtype=torch.int64), torch.arange(64), 1 << 15)
    for cut in (2.0**-8, 2.0**-12, 2.0**-16):
        expected = u.numel() * cut
        assert abs(int((u < cut).sum()) - expected) < SIGMAS * math.sqrt(expected)


def test_neighbouring_seeds_positions_and_tokens_are_unrelated() -> None:
    seeds, positions = torch.arange(100).repeat_interleave(20), torch.arange(20).repeat(100)
    u = uniform_noise(seeds, positions, 32)
    assert_uncorrelated(u, uniform_noise(seeds + 1, positions, 32))
    assert_uncorrelated(u, uniform_noise(seeds, positions + 1, 32))
    assert_uncorrelated(u, uniform_noise(seeds + 1, positions - 1, 32))
    assert_uncorrelated(u, uniform_noise(positions, seeds, 32))
    assert_uncorrelated(u[:, 1:], u[:, :-1])
    assert_uncorrelated(u[:, 2:], u[:, :-2])


def test_streams_are_unrelated_to_each_other_and_to_the_vocabulary_noise() -> None:
    seeds, positions = torch.arange(200).repeat_interleave(100), torch.arange(100).repeat(200)
    first, second = (stream_uniform(seeds, positions, stream) for stream in (0, 1))
    assert_uncorrelated(first, second)
    assert_uncorrelated(first, stream_uniform(seeds, positions + 1, 0))
    assert_uncorrelated(first, stream_uniform(seeds + 1, positions, 0))
    for token in range(3):
        assert_uncorrelated(first, uniform_noise(seeds, positions, 3)[:, token])


def test_every_bit_of_seed_position_and_token_reaches_every_bit_of_the_noise() -> None:
    """Flipping one input bit flips each output bit about half of the time."""

    def bits(seeds: Tensor, positions: Tensor) -> Tensor:
        words = noise._vocab_bits(seeds, positions, 64).long()  # [R, V]
        return (words.unsqueeze(-1) >> torch.arange(31)) & 1

    seeds = torch.arange(60) * 7919
    positions = torch.arange(60)
    base = bits(seeds, positions)
    bound = SIGMAS * 0.5 / math.sqrt(60 * 64)
    for bit in range(64):
        flip = ints(1 << bit if bit < 63 else -(1 << 63))
        for other in (bits(seeds ^ flip, positions), bits(seeds, positions ^ flip)):
            share = (base != other).double().mean((0, 1))  # [31]
            assert (share - 0.5).abs().max() < bound, bit
    for token_bit in (1, 2, 4, 8, 16, 32):
        other = base[:, torch.arange(64) ^ token_bit]
        share = (base != other).double().mean((0, 1))
        assert (share - 0.5).abs().max() < bound * math.sqrt(2), token_bit  # pairs count twice


def test_both_halves_of_a_rows_key_matter(monkeypatch) -> None:
    """With 32 bits alone, rows of a busy server would soon share their noise."""
    monkeypatch.setattr(noise, "_row_keys", lambda *_: ints(5, 5 + (9 << 32), 6))
    u = noise.uniform_noise(ints(0, 0, 0), ints(0, 0, 0), 100)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (u[a] != u[b]).sum() >= 99


def test_no_seed_replays_another_seed_at_a_shifted_position() -> None:
    """Seed and position are not merely xored: what position 1 adds, no seed can undo."""
    domain = noise._DOMAIN_VOCAB * noise._GOLDEN64
    replaying = noise._signed(((42 + domain) ^ noise._GOLDEN64) - domain, 64)
    u = uniform_noise(ints(42, replaying), ints(1, 0), 100)
    assert (u[0] != u[1]).sum() >= 99


def test_derived_seeds_are_distinct_and_fit_int64() -> None:
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds)
    assert derive_seed((1 << 64) - 1, 0) == -1
    assert derive_seed((1 << 64) - 1, 1) == derive_seed(-1, 1)


def test_the_first_answer_of_many_is_the_only_answer_of_one() -> None:
    assert derive_seed(42, 0) == 42


def test_host_and_tensor_mixing_agree() -> None:
    values = [0, 1, -1, 0x0123456789ABCDEF, -(1 << 63)]
    mixed = noise._mix64(ints(*values)).tolist()
    assert mixed == [noise._signed(noise._mix64_int(value), 64) for value in values]


@pytest.mark.gpu
def test_uniforms_are_bit_equal_on_a_gpu_and_inside_a_cuda_graph() -> None:
    seeds, positions = torch.arange(5) * 1_000_003 - 7, torch.arange(5) % 2
    expected = uniform_noise(seeds, positions, 1000)
    on_gpu = seeds.cuda(), positions.cuda()
    assert torch.equal(uniform_noise(*on_gpu, 1000).cpu(), expected)
    uniforms = stream_uniform(*on_gpu, 1).cpu()
    assert torch.equal(uniforms, stream_uniform(seeds, positions, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gumbel_noise(*on_gpu, 1000)
    graph.replay()
    torch.testing.assert_close(
        captured.cpu(), gumbel_noise(seeds, positions, 1000), **near(terms=1)
    )

"""Tokens sampled by kernels are those that `speculation` defines, whatever the row holds."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.gpu import sampling as fast
from peagle.kernels.gpu.argmax import find_peaks
from peagle.kernels.gpu.noise import gumbel, gumbel_of, uniform, vocab_key
from peagle.kernels.reference import sampling as reference
from peagle.kernels.reference.sampling import SampledTokens, SamplingMetadata
from peagle.speculation.noise import gumbel_noise, uniform_noise
from peagle.speculation.sampling import SamplingRows, filter_logits
from tests.tolerance import near

INF, NAN = math.inf, math.nan
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR_TIE = 1e-5  # scores nearer than this may be decided by the last bits of a logarithm
CHUNK, BLOCK = 16, 64  # several of them even in a tiny vocabulary
EXAMPLES = 300 if DEVICE == "cuda" else 5  # the interpreter takes a third of a second for a row

Setting = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def make_metadata(row_settings: list[Setting], seed: int = 7) -> SamplingMetadata:
    temperature, top_k, top_p, min_p = zip(*row_settings, strict=True)
    rows = torch.arange(len(row_settings))
    floats = [torch.tensor(column, dtype=torch.float32) for column in (temperature, top_p, min_p)]
    keys = seed * 1_000_003 + rows * 7919, rows % 5
    metadata = SamplingMetadata(floats[0], torch.tensor(top_k), floats[1], floats[2], *keys)
    return SamplingMetadata(*(column.to(DEVICE) for column in metadata))


def random_logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator).mul(scale).to(DEVICE)


def assert_same_tokens(
    logits: Tensor,
    metadata: SamplingMetadata | None,
    ids: Tensor | None = None,
    filters: bool = True,
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> None:
    expected = reference.sample_tokens(logits, metadata, ids, filters=filters)
    actual = fast.sample_in_chunks(logits, metadata, ids, filters, chunk, block)
    assert_same(actual, expected, logits, metadata, ids)


def assert_same(
    actual: SampledTokens, expected: SampledTokens, logits: Tensor, metadata, ids
) -> None:
    """Equal tokens; where they are not, the definition's scores of both must be a near tie."""
    assert actual.usable.tolist() == expected.usable.tolist()
    for row in (actual.token_ids != expected.token_ids).nonzero().flatten().tolist():
        assert metadata is not None, "greedy tokens have no rounding"
        gap = score_gap(logits, metadata, ids, row, actual.token_ids[row], expected.token_ids[row])
        print(f"row {row}: near tie, gap {gap}")  # noqa: T201
        assert gap < NEAR_TIE


def score_gap(
    logits, metadata: SamplingMetadata, ids, row: int, token: Tensor, other: Tensor
) -> float:
    """How far apart two tokens' scores are by the definition; inf if one was filtered away."""
    own = SamplingMetadata(*(column[row : row + 1] for column in metadata))
    filtered = filter_logits(logits[row : row + 1], SamplingRows(*own[:4]))[0].double()
    columns = torch.arange(len(filtered), device=logits.device) if ids is None else ids
    noise = gumbel_noise(own.seeds, own.positions, int(columns.max()) + 1)[0, columns]
    scores = filtered - filtered.amax() + noise
    gap = scores[columns == token] - scores[columns == other]
    return float(gap.abs().nan_to_num(nan=INF))


# --- noise


@triton.jit
def noise_kernel(seeds, positions, uniforms, gumbels, SIZE: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, SIZE)
    key = vocab_key(tl.load(seeds + row), tl.load(positions + row))
    tl.store(uniforms + row * SIZE + tokens, uniform(key, tokens))
    tl.store(gumbels + row * SIZE + tokens, gumbel(key, tokens))


@triton.jit
def gumbel_kernel(uniforms, gumbels, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(gumbels + at, gumbel_of(tl.load(uniforms + at)))


def test_uniforms_have_the_bits_of_the_definition() -> None:
    seeds = torch.tensor([0, -1, 1 << 40, -(1 << 63), (1 << 63) - 1], device=DEVICE)
    positions = torch.tensor([0, 7, 100_000, 3, 1 << 33], device=DEVICE)
    uniforms = torch.empty(5, 512, device=DEVICE)
    gumbels = torch.empty_like(uniforms)
    noise_kernel[(5,)](seeds, positions, uniforms, gumbels, SIZE=512)
    assert torch.equal(uniforms, uniform_noise(seeds, positions, 512))
    expected = gumbel_noise(seeds, positions, 512)
    torch.testing.assert_close(gumbels, expected, **near(terms=1))


def test_gumbels_are_right_from_the_smallest_uniform_to_the_largest() -> None:
    """The steps of 31 bits at both ends, and powers of two with their neighbours between."""
    ends = torch.cat([torch.arange(3000), 2**31 - 1 - torch.arange(1000) * 100])
    powers = torch.cat([(1 << torch.arange(4, 31)) + step for step in range(-3, 4)])
    bits = torch.cat([ends, powers, torch.arange(4096 - 4189 % 4096) * 500_009])
    u = bits.float().add(0.5).mul(2.0**-31).clamp(max=1.0 - 2.0**-24).to(DEVICE)
    gumbels = torch.empty_like(u)
    gumbel_kernel[(len(u) // 4096,)](u, gumbels, SIZE=4096)
    true = -torch.log(-torch.log1p(-u.double()))
    assert len(u) % 4096 == 0
    # Less than two last bits of the largest, which is 22.
    assert float((gumbels.double() - true).abs().max()) < 2e-6


# --- greedy


def test_the_lowest_id_wins_among_equals_within_and_across_chunks() -> None:
    logits = torch.full((4, 70), -1.0, device=DEVICE)
    logits[0, [19, 21, 69]] = 2.0
    logits[1, [15, 16]] = 2.0
    logits[2, 69] = 2.0
    sampled = fast.sample_in_chunks(logits, None, None, False, CHUNK, BLOCK)
    assert sampled.token_ids.tolist() == [19, 15, 69, 0]
    assert sampled.usable.all()


@pytest.mark.slow
@pytest.mark.parametrize("random", [False, True])
def test_nothing_is_sampled_from_a_row_with_a_nan_wherever_it_stands(random: bool) -> None:
    logits = random_logits(7, 36)
    logits[torch.arange(6), torch.tensor([0, 1, 15, 16, 33, 35])] = NAN
    metadata = make_metadata([(1.0, 0, 1.0, 0.0)] * 7) if random else None
    sampled = fast.sample_in_chunks(logits, metadata, None, False, CHUNK, BLOCK)
    assert sampled.usable.tolist() == [False] * 6 + [True]
    assert sampled.token_ids[:6].tolist() == [0] * 6
    assert_same_tokens(logits, metadata, filters=False)


@pytest.mark.slow
@pytest.mark.parametrize("with_ids", [False, True])
def test_rows_that_admit_no_token_are_reported(with_ids: bool) -> None:
    logits = torch.zeros(6, 40, device=DEVICE)
    logits[0, 3], logits[1, 30], logits[2] = NAN, INF, -INF
    logits[3], logits[3, 33] = -INF, -5.0
    logits[4] = NAN
    ids = torch.arange(40, device=DEVICE) + 9 if with_ids else None
    for metadata in (None, make_metadata([(0.5, 0, 1.0, 0.1)] * 6)):
        sampled = fast.sample_in_chunks(logits, metadata, ids, True, CHUNK, BLOCK)
        assert sampled.usable.tolist() == [False, False, False, True, False, True]
        assert sampled.token_ids[[0, 1, 2, 4]].tolist() == [0] * 4
        assert sampled.token_ids[3] == (33 + 9 if with_ids else 33)


# --- sampled

ROWS = st.lists(
    st.one_of(
        st.integers(-16, 16).map(lambda x: x / 4),  # quarters make ties frequent
        st.sampled_from([-INF, -INF, 0.0, -0.0, 1e30, -1e30, 1e-42]),
        st.floats(-20, 20, width=32),
    ),
    min_size=37,
    max_size=37,
)
SETTINGS = st.tuples(
    st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 20, 36, 37, 99]),
    st.sampled_from([1e-6, 0.1, 0.37, 0.5, 0.8, 0.93, 1.0]),
    st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.9, 1.0]),
)
IDS = torch.arange(37) * 5 + 3
MIXED: list[Setting] = [
    (1.0, 5, 0.9, 0.0),
    (0.0, 0, 1.0, 0.0),
    (0.7, 0, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
]


@pytest.mark.slow
@given(st.lists(st.tuples(ROWS, SETTINGS), min_size=1, max_size=2), st.integers(0, 999))
@settings(max_examples=EXAMPLES)
def test_any_row_under_any_filters_gives_the_token_of_the_definition(rows, seed: int) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32, device=DEVICE)
    metadata = make_metadata([setting for _, setting in rows], seed)
    assert_same_tokens(logits, metadata)


@pytest.mark.slow
@given(st.lists(st.tuples(ROWS, SETTINGS), min_size=1, max_size=2), st.integers(0, 999))
@settings(max_examples=EXAMPLES)
def test_any_row_without_filters_gives_the_token_of_the_definition(rows, seed: int) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32, device=DEVICE)
    metadata = make_metadata([(setting[0], 0, 1.0, 0.0) for _, setting in rows], seed)
    assert_same_tokens(logits, metadata, filters=False)
    assert_same_tokens(logits, metadata, IDS.to(DEVICE), filters=False)


def test_of_an_even_row_a_nucleus_keeps_the_lowest_ids() -> None:
    """The tied tokens of the threshold lie in several blocks."""
    logits = torch.zeros(1, 200, device=DEVICE)
    metadata = make_metadata([(1.0, 0, 0.75, 0.0)])
    chunks = find_peaks(logits, CHUNK)
    assert fast.find_thresholds(logits, metadata, chunks, 64).last_columns.tolist() == [149]


@pytest.mark.slow
def test_noise_is_that_of_the_targets_ids() -> None:
    """A reduced vocabulary draws what the whole one would if the other tokens were banned."""
    ids = torch.tensor([2, 3, 11, 29, 30, 44, 71, 90, 99], device=DEVICE)
    logits = random_logits(20, len(ids), 1.0)
    whole = torch.full((20, 100), -INF, device=DEVICE).index_copy(1, ids, logits)
    metadata = make_metadata([(1.0, 0, 1.0, 0.0)] * 20)
    reduced = fast.sample_in_chunks(logits, metadata, ids, False, CHUNK, BLOCK)
    banned = fast.sample_in_chunks(whole, metadata, None, False, 128, BLOCK)
    assert reduced.token_ids.tolist() == banned.token_ids.tolist()
    assert len(set(reduced.token_ids.tolist())) > 4


@pytest.mark.slow
def test_random_rows_are_sampled_as_the_definition_does() -> None:
    logits = random_logits(30, 300, 1.5)
    assert_same_tokens(logits, make_metadata([(0.9, 0, 1.0, 0.0)] * 30), filters=False, chunk=256)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_from_as_they_are(dtype: torch.dtype) -> None:
    logits = random_logits(4, 90).to(dtype)
    metadata = make_metadata([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)] * 2)
    assert_same_tokens(logits, None)
    assert_same_tokens(logits, metadata, filters=False)
    assert_same_tokens(logits[:1], make_metadata([(1.0, 9, 0.7, 0.0)]))


@pytest.mark.slow
def test_rows_may_lie_apart_in_memory() -> None:
    wide = random_logits(3, 120)
    wide[:, 50:] = 99.0
    assert_same_tokens(wide[:, :50], None)
    assert_same_tokens(wide[::2, :50], make_metadata([(1.0, 9, 0.8, 0.0)] * 2))


@pytest.mark.slow
def test_a_row_depends_neither_on_its_neighbours_nor_on_the_chunks() -> None:
    logits = random_logits(4, 70)
    metadata = make_metadata(MIXED)
    alone = [
        fast.sample_in_chunks(
            logits[row : row + 1],
            SamplingMetadata(*(column[row : row + 1] for column in metadata)),
            None,
            True,
            CHUNK,
            BLOCK,
        ).token_ids.item()
        for row in (0, 1, 3)
    ]
    logits[2] = NAN
    sampled = fast.sample_in_chunks(logits, metadata, None, True, 128, BLOCK)
    assert [sampled.token_ids[row].item() for row in (0, 1, 3)] == alone


def test_inputs_are_left_alone() -> None:
    logits, metadata = random_logits(1, 40), make_metadata([(1.0, 5, 1.0, 0.1)])
    before = [logits.clone(), *(column.clone() for column in metadata)]
    fast.sample_tokens(logits, metadata)
    fast.sample_with_probs(logits, metadata, None, torch.empty_like(logits))
    fast.token_probs(logits, metadata)
    assert all(torch.equal(a, b) for a, b in zip(before, [logits, *metadata], strict=True))


# --- real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_vocabulary_is_sampled_from_as_on_the_cpu(rows: int, dtype: torch.dtype) -> None:
    logits = random_logits(rows, 49_152, 2.0).to(dtype)
    metadata = make_metadata((MIXED * rows)[:rows])
    off = make_metadata([(1.0, 0, 1.0, 0.0)] * rows)
    for row_metadata, filters in ((None, False), (metadata, True), (off, False), (off, True)):
        on_cpu = (
            None
            if row_metadata is None
            else SamplingMetadata(*(column.cpu() for column in row_metadata))
        )
        expected = reference.sample_tokens(logits.cpu(), on_cpu, None, filters=filters)
        actual = fast.sample_tokens(logits, row_metadata, None, filters=filters)
        on_host = SampledTokens(*(x.cpu() for x in actual))
        assert_same(on_host, expected, logits.cpu(), on_cpu, None)


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True])
def test_sampling_can_be_captured_in_a_cuda_graph(filters: bool) -> None:
    logits, metadata = random_logits(4, 49_152), make_metadata(MIXED)
    eager = fast.sample_tokens(logits, metadata, filters=filters)
    probs = fast.token_probs(logits, metadata, filters=filters).probs
    drawn = torch.empty_like(probs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast.sample_tokens(logits, metadata, filters=filters)
        captured_probs = fast.token_probs(logits, metadata, filters=filters).probs
        fast.sample_with_probs(logits, metadata, None, drawn, filters=filters)
    graph.replay()
    assert torch.equal(captured.token_ids, eager.token_ids)
    assert torch.equal(captured_probs, probs)
    assert torch.equal(drawn, probs)
    metadata.seeds.add_(1)
    graph.replay()
    assert torch.equal(
        captured.token_ids, fast.sample_tokens(logits, metadata, filters=filters).token_ids
    )

"""Each CPU kernel agrees with torch's operation, and is batch-invariant."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.cpu.ops import CpuKernels, PagedSpan, PagedStep, cpu_kernels, kernels_for
from peagle.models import layers
from peagle.models.attention import causal_attention
from peagle.models.drafter import CacheLayout, Span
from tests.kernels.cpu.compiler import needs_kernels
from tests.tolerance import near

pytestmark = needs_kernels

ROWS = st.integers(1, 9)
SCALES = st.sampled_from([1e-6, 1.0, 30.0, 1e4])
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def kernels() -> CpuKernels:
    found = cpu_kernels()
    assert found is not None
    return found


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_agree(ours: Tensor, exact: Tensor, terms: int) -> None:
    """`exact` was computed in float64."""
    allowed = near(exact, terms=terms)
    torch.testing.assert_close(ours, exact.float(), **allowed, check_stride=False)


@given(rows=ROWS, size=st.integers(1, 600), scale=SCALES, seed=st.integers(0, 99))
def test_rms_norm_agrees(rows: int, size: int, scale: float, seed: int) -> None:
    x, weight = normal(rows, size, seed=seed, scale=scale), normal(size, seed=seed + 1)
    exact = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert_agree(kernels().rms_norm(x, weight, 1e-5), exact, terms=1)  # squares in float64


@pytest.mark.parametrize("size", [5, 8, 19])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rms_norm_treats_what_is_not_finite_as_torch_does(
    size: int, place: int, value: float
) -> None:
    x, weight = normal(2, size), torch.ones(size)
    x[0, place] = value
    ours, theirs = kernels().rms_norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5)
    torch.testing.assert_close(ours, theirs, **near(terms=size), equal_nan=True)


def test_rms_norm_of_large_values_does_not_overflow() -> None:
    x = torch.full((1, 11), 1e30)
    ours = kernels().rms_norm(x, torch.ones(11), 1e-5)
    torch.testing.assert_close(ours, torch.ones(1, 11), **near(terms=1))


def test_rms_norm_reads_heads_that_lie_apart() -> None:
    x, weight = normal(3, 10, 16)[:, 2:7], normal(16, seed=1)
    exact = F.rms_norm(x.double(), (16,), weight.double(), 1e-6)
    assert_agree(kernels().rms_norm(x, weight, 1e-6), exact, terms=1)


@given(rows=ROWS, heads=st.integers(1, 5), half=st.integers(1, 40), more=st.integers(0, 3))
def test_rotate_agrees_on_a_slice_of_the_projection(
    rows: int, heads: int, half: int, more: int
) -> None:
    dim = 2 * half
    x = normal(rows, heads + more, dim)[:, :heads]
    rotation = normal(rows, 1, dim, seed=1), normal(rows, 1, dim, seed=2)
    exact = layers.rotate(x.double(), (rotation[0].double(), rotation[1].double()))
    assert_agree(kernels().rotate(x, *rotation), exact, terms=2)


@given(rows=ROWS, size=st.integers(1, 70), scale=SCALES, seed=st.integers(0, 99))
def test_silu_mul_agrees(rows: int, size: int, scale: float, seed: int) -> None:
    gate_up = normal(rows, 2 * size, seed=seed, scale=scale)
    exact = layers.silu_mul(gate_up.double())
    ours = kernels().silu_mul(gate_up)
    torch.testing.assert_close(ours, exact.float(), **near(1e-24, terms=1))


def test_silu_agrees_over_the_whole_range_of_float32() -> None:
    gates = torch.cat((torch.linspace(-120, 120, 100_003), torch.linspace(-1, 1, 100_003)))
    ours = kernels().silu_mul(torch.cat((gates, torch.ones_like(gates)))[None])[0]
    # No sum to speak of: the exponential to about one unit, then a few roundings of half a unit.
    units = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(ours, F.silu(gates.double()).float(), rtol=units, atol=1e-36)


@pytest.mark.parametrize("size", [1, 8, 11])
def test_silu_mul_treats_what_is_not_finite_as_torch_does(size: int) -> None:
    special = [NAN, INF, -INF, 3e38, -3e38, 0.0, 1.0]
    for gate in special:
        for up in special:
            gate_up = torch.tensor([[gate] * size + [up] * size])
            theirs = F.silu(gate_up[:, :size].clone()) * up
            ours = kernels().silu_mul(gate_up)
            torch.testing.assert_close(ours, theirs, **near(terms=1), equal_nan=True)


BLOCK, NUM_BLOCKS, PER_SEQUENCE = 5, 90, 30


def poisoned_cache(kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    layout = CacheLayout(2, kv_heads, dim)
    cache = PagedKVCache(layout, NUM_BLOCKS * BLOCK, dtype, torch.device("cpu"))
    cache.keys.fill_(NAN)  # reading what was never written shows
    cache.values.fill_(NAN)
    return cache


def tables_of(blocks: list[int], count: int) -> list[BlockTable]:
    tables = [BlockTable(BLOCK, range(0)) for _ in range(count)]
    for n, table in enumerate(tables):
        for block in blocks[PER_SEQUENCE * n : PER_SEQUENCE * (n + 1)]:
            table.append(block)
    return tables


@pytest.mark.slow
@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, PER_SEQUENCE * BLOCK), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([8, 24, 64, 72, 128, 192]),
    scattered=st.booleans(),
    window=st.sampled_from([None, 1, 7, 64, 65, 100]),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    data=st.data(),
)
def test_paged_attention_in_any_chunks_equals_causal_attention_in_float64(
    lengths: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    scattered: bool,
    window: int | None,
    scale: float,
    data: st.DataObject,
) -> None:
    cache = poisoned_cache(kv_heads, dim)
    blocks = list(range(NUM_BLOCKS))
    if scattered:
        blocks = data.draw(st.permutations(blocks))
    tables = tables_of(blocks, len(lengths))
    whole = [
        (
            normal(length, kv_heads * group, dim, seed=n, scale=scale),
            normal(length, kv_heads, dim, seed=10 + n, scale=scale),
            normal(length, kv_heads, dim, seed=20 + n),
        )
        for n, length in enumerate(lengths)
    ]
    done = [0] * len(lengths)
    outs: list[list[Tensor]] = [[] for _ in lengths]
    while spans := [
        Span(n, done[n], data.draw(st.integers(1, length - done[n])))
        for n, length in enumerate(lengths)
        if done[n] < length
    ]:
        attention = cache.attention(tables, spans)
        assert attention.kernel_place(kv_heads * group) is not None
        parts = [[x[s.start : s.start + s.length] for x in whole[s.sequence]] for s in spans]
        rows = torch.cat([torch.cat(p, dim=1) for p in parts])  # [N, h + 2g, D], as projected
        q, k, v = rows.split((kv_heads * group, kv_heads, kv_heads), dim=1)
        out = attention(1, q, k, v, window)
        for s, piece in zip(spans, out.split([s.length for s in spans]), strict=True):
            outs[s.sequence].append(piece)
            done[s.sequence] += s.length
    for (q, k, v), pieces in zip(whole, outs, strict=True):
        reference = causal_attention(torch.arange(len(q)))
        exact = reference(1, q.double(), k.double(), v.double(), window)
        # Scores of a hundred lose a few digits before the exponential, in torch as well.
        allowed = near(max(1.0, scale**2), terms=max(dim, len(q)))
        torch.testing.assert_close(torch.cat(pieces), exact.float(), **allowed)
    assert cache.keys[0].isnan().all()  # the other layer is not touched


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other(
    value: float, which: str
) -> None:
    q, k, v = normal(50, 2, 16), normal(50, 1, 16, seed=1), normal(50, 1, 16, seed=2)
    (k if which == "key" else v)[40, 0, 3] = value
    cache, (table,) = poisoned_cache(1, 16), tables_of(list(range(NUM_BLOCKS)), 1)
    out = cache.attention([table], [Span(0, 0, 50)])(0, q, k, v, None)
    before = causal_attention(torch.arange(40))(0, q[:40], k[:40], v[:40], None)
    torch.testing.assert_close(out[:40], before, **near(terms=40))
    for row in range(40, 50):
        scores = torch.einsum("hd,td->ht", q[row], k[: row + 1, 0]) / 4
        seen = scores.softmax(-1) @ v[: row + 1, 0]  # [h, D]
        torch.testing.assert_close(out[row], seen, **near(terms=50), equal_nan=True)


def test_scores_far_below_zero_in_the_first_tile_do_not_vanish() -> None:
    q, k, v = torch.ones(72, 1, 8), torch.full((72, 1, 8), -1e3), normal(72, 1, 8)
    cache, (table,) = poisoned_cache(1, 8), tables_of(list(range(NUM_BLOCKS)), 1)
    out = cache.attention([table], [Span(0, 0, 72)])(0, q, k, v, None)
    means = v.cumsum(0) / torch.arange(1, 73)[:, None, None]
    torch.testing.assert_close(out, means, **near(terms=72))


def test_a_first_tile_of_minus_infinity_adds_nothing_to_the_tiles_behind_it() -> None:
    """As in torch: such keys have no weight, and a row that sees no other key is NaN."""
    q, k, v = torch.ones(72, 1, 8), normal(72, 1, 8, seed=1), normal(72, 1, 8, seed=2)
    k[:64, 0, 5] = -INF  # a whole tile of scores
    cache, (table,) = poisoned_cache(1, 8), tables_of(list(range(NUM_BLOCKS)), 1)
    out = cache.attention([table], [Span(0, 0, 72)])(0, q, k, v, None)
    assert out[:64].isnan().all()
    alone = causal_attention(torch.arange(8))(0, q[64:], k[64:], v[64:], None)
    torch.testing.assert_close(out[64:], alone, **near(terms=8))


@pytest.mark.parametrize("wide", [64, 256])
def test_a_head_of_whole_groups_of_registers_equals_a_narrow_one_repeated(wide: int) -> None:
    """A head of 16 is summed one vector at a time, the others several at a time with no rest."""
    narrow, growth = 16, wide // 16
    q, k, v = (normal(70, heads, narrow, seed=n) for n, heads in enumerate((2, 1, 1)))
    table = tables_of(list(range(NUM_BLOCKS)), 1)
    expected = poisoned_cache(1, narrow).attention(table, [Span(0, 0, 70)])(0, q, k, v, None)
    # Scores are divided by the root of the head size; what zeros widen adds nothing to them.
    q, k = (F.pad(x, (0, wide - narrow)) for x in (q * growth**0.5, k))
    run = poisoned_cache(1, wide).attention(table, [Span(0, 0, 70)])
    out = run(0, q, k, v.repeat(1, 1, growth), None)
    torch.testing.assert_close(out, expected.repeat(1, 1, growth), **near(terms=70))


@given(size=st.integers(2, 130), first=st.integers(0, 6), count=st.integers(1, 3))
def test_a_row_of_the_row_wise_kernels_is_batch_invariant(
    size: int, first: int, count: int
) -> None:
    size -= size % 2
    x, weight = normal(9, size), normal(size, seed=1)
    some = slice(first, first + count)
    run = kernels()
    assert torch.equal(run.rms_norm(x, weight, 1e-5)[some], run.rms_norm(x[some], weight, 1e-5))
    assert torch.equal(run.silu_mul(x)[some], run.silu_mul(x[some]))
    heads, cos, sin = normal(9, 3, size), normal(9, 1, size, seed=1), normal(9, 1, size, seed=2)
    alone = run.rotate(heads[some], cos[some], sin[some])
    assert torch.equal(run.rotate(heads, cos, sin)[some], alone)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dim", [16, 64, 72, 128, 256])  # 256: tiles are copied for many rows
def test_a_row_of_attention_is_batch_invariant(dim: int, window: int | None) -> None:
    q, k, v = normal(100, 6, dim), normal(100, 2, dim, seed=1), normal(100, 2, dim, seed=2)
    other = normal(7, 6, dim, seed=3), normal(7, 2, dim, seed=4), normal(7, 2, dim, seed=5)
    tables = tables_of(list(range(NUM_BLOCKS)), 2)
    together = poisoned_cache(2, dim).attention([*tables], [Span(1, 0, 7), Span(0, 0, 100)])
    joined = (torch.cat((a, b)) for a, b in zip(other, (q, k, v), strict=True))
    at_once = together(0, *joined, window)[7:]
    cache = poisoned_cache(2, dim)
    one_by_one = [
        cache.attention(tables, [Span(0, p, 1)])(0, q[p, None], k[p, None], v[p, None], window)
        for p in range(100)
    ]
    assert torch.equal(at_once, torch.cat(one_by_one))


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("dim", [16, 64, 256])
@pytest.mark.parametrize("start", [0, 30, 61, 63, 130])
def test_a_row_of_a_tree_has_the_bits_that_its_path_has_as_a_chain(
    start: int, dim: int, window: int | None
) -> None:
    parents = [0, 0, 1, 2, 3, 3, 5, 0, 8, 4]
    size = len(parents) + 1
    q, k, v = (normal(start + size, heads, dim, seed=n) for n, heads in enumerate((6, 2, 2)))
    tables = tables_of(list(range(NUM_BLOCKS)), 1)

    def attended(spans: list[Span], rows: list[int]) -> Tensor:
        """The rows of the last span, behind a prompt."""
        cache = poisoned_cache(2, dim)
        if start:
            cache.attention(tables, [Span(0, 0, start)])(0, q[:start], k[:start], v[:start], window)
        return cache.attention(tables, spans)(0, q[rows], k[rows], v[rows], window)

    tree = attended([Span(0, start, size, parents)], [start + n for n in range(size)])
    for row in range(size):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0] - 1])
        chain = attended([Span(0, start, len(path))], [start + n for n in path])
        assert torch.equal(tree[row], chain[-1]), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by the kernel and by torch
@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_a_tree_that_come_later_see_those_in_the_cache(
    dtype: torch.dtype, window: int | None
) -> None:
    parents, start = [0, 0, 1, 2, 3, 3, 5, 0, 8, 4], 11
    size = len(parents) + 1
    q, k, v = (
        normal(start + size, heads, 16, seed=n).to(dtype) for n, heads in enumerate((6, 2, 2))
    )
    tables = tables_of(list(range(NUM_BLOCKS)), 1)

    def attended(passes: list[Span]) -> Tensor:
        cache, out = poisoned_cache(2, 16, dtype=dtype), []
        for span in passes:
            first = span.start + span.first_row
            rows = slice(first, first + span.length)
            out.append(cache.attention(tables, [span])(0, q[rows], k[rows], v[rows], window))
        return torch.cat(out[1:])

    together = attended([Span(0, 0, start), Span(0, start, size, parents)])
    cuts = [0, 1, 4, 5, size]
    parts = [
        Span(0, start, end - first, parents[: end - 1], first)
        for first, end in itertools.pairwise(cuts)
    ]
    assert parts[3].length > 1
    torch.testing.assert_close(attended([Span(0, 0, start), *parts]), together)


def test_kernels_are_for_float32_without_gradients() -> None:
    assert kernels_for(torch.zeros(1)) is not None
    assert kernels_for(torch.zeros(1, dtype=torch.float64)) is None
    assert kernels_for(torch.zeros(1, dtype=torch.bfloat16)) is None
    with torch.inference_mode(False), torch.enable_grad():
        assert kernels_for(torch.zeros(1)) is None
        with torch.no_grad():
            assert kernels_for(torch.zeros(1)) is not None


def test_a_table_too_short_for_its_span_is_refused_before_memory_is_touched() -> None:
    with pytest.raises(AssertionError):
        PagedStep([PagedSpan(8, 3, [0, 1])], 5, 2, 1, 8)

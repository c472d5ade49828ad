"""Paged attention: the kernel agrees with its expected, the reference with the definition."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.gpu import attention
from peagle.kernels.gpu.attention import FEW_PROGRAMS, choose_splits, paged_attention, tile
from peagle.kernels.reference import attention as reference
from peagle.kernels.reference.attention import Scores
from peagle.models.drafter import CacheLayout, Span
from peagle.speculation import trees
from tests.kernels.gpu.paged_cases import (
    DEVICE,
    EXAMPLES,
    TOLERANCE,
    Case,
    Item,
    Shape,
    attention_by_definition,
    make_case,
    make_rows,
    shapes,
)

WINDOWS = st.none() | st.integers(1, 100)
PADDING = Item(start=3, end=0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(shape=shapes(), window=WINDOWS, half=st.booleans(), seed=st.integers(0, 9))
@example(Shape((Item(130, 131), PADDING), 1, 4, 2, 16, 4, 4), None, False, 0)
@example(Shape((Item(64, 65), Item(128, 129)), 1, 3, 1, 16, 16, 2), 65, False, 0)
@example(Shape((Item(128, 131),), 3, 2, 1, 16, 16, 1), 20, True, 0)
def test_kernel_agrees_with_its_reference(
    shape: Shape, window: int | None, half: bool, seed: int
) -> None:
    dtype = torch.float16 if half else torch.float32
    case = make_case(shape, dtype, seed)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])


@settings(max_examples=20)
@given(shape=shapes(capacity=24), window=st.none() | st.integers(1, 20))
def test_the_reference_is_the_definition(shape: Shape, window: int | None) -> None:
    case = make_case(shape, torch.float64, capacity=24)
    ours = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = attention_by_definition(case, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float64])


SCORES = {
    "scaled": Scores(scale=0.4),
    "capped": Scores(cap=1.5),
    "sinks": Scores(sinks=torch.tensor([30.0, -30.0, 0.5, 2.0])),
    "all": Scores(scale=0.5, cap=2.0, sinks=torch.tensor([0.3, -1.0, 9.0, 2.0])),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (3, 20)])
def test_scores_of_other_kinds_and_narrow_rows_agree_with_the_reference(
    scores: Scores, num_splits: int, window: int | None
) -> None:
    """Keys are the beginnings of wider rows, as in a layer of Gemma-4."""
    case = make_case(Shape((Item(70, 73), PADDING), 3, 2, 2, 16, 4, num_splits), torch.float32)
    keys, values = (
        torch.nn.functional.pad(x.flatten(1), (0, 9))[:, :32].view(-1, 2, 16)
        for x in (case.keys, case.values)
    )
    assert not keys.is_contiguous()
    sinks = None if scores.sinks is None else scores.sinks.to(DEVICE)
    scores = scores._replace(sinks=sinks)
    ours = paged_attention(case.q, keys, values, case.rows, window, scores=scores)
    expected = reference.paged_attention(case.q, keys, values, case.rows, window, scores)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])
    plain = reference.paged_attention(case.q, keys, values, case.rows, window)
    assert not torch.allclose(ours, plain, atol=1e-3)


def with_trees(case: Case, seed: int) -> Case:
    """The same items, each of them a tree."""
    generator, rows = torch.Generator().manual_seed(seed), case.rows
    batch, size = len(rows.starts), rows.rows_per_item - 1
    columns = [torch.randint(0, n + 1, (batch,), generator=generator) for n in range(size)]
    parents = torch.stack(columns, 1) if size else torch.zeros(batch, 0, dtype=torch.int64)
    positions = (rows.starts.cpu()[:, None] + trees.depths(parents)).flatten()
    ancestors = trees.ancestors(parents).flatten().to(DEVICE)
    changes = {"ancestors": ancestors, "positions": positions.to(DEVICE)}
    return replace(case, rows=rows._replace(**changes))


def behind(case: Case, first_row: int, size: int) -> Case:
    """The rows of trees from `first_row` on, where those before are in the cache."""
    rows, num_items = case.rows, len(case.rows.starts)

    def own(x: Tensor) -> Tensor:
        by_item = x.view(num_items, rows.rows_per_item, *x.shape[1:])
        return by_item[:, first_row : first_row + size].flatten(0, 1).contiguous()

    assert rows.ancestors is not None
    changes = {"ancestors": own(rows.ancestors), "positions": own(rows.positions)}
    sizes = {"slots": own(rows.slots), "rows_per_item": size, "first_row": first_row}
    return replace(case, q=own(case.q), rows=rows._replace(**changes, **sizes))


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(shape=shapes(), seed=st.integers(0, 99), data=st.data())
def test_later_rows_of_trees_see_what_they_see_beside_the_earlier(
    shape: Shape, seed: int, data: st.DataObject
) -> None:
    whole = with_trees(make_case(shape, torch.float32, seed), seed)
    first_row = data.draw(st.integers(0, shape.rows_per_item - 1))
    size = data.draw(st.integers(1, shape.rows_per_item - first_row))
    check_later_rows(whole, shape, first_row, size, None)


@pytest.mark.parametrize("window", [5, 12, 50])
def test_a_window_ends_before_a_tree_whose_earlier_rows_are_cached(window: int) -> None:
    """It sees a whole path, and as much before the tree as its size and the row's depth leave."""
    shape = Shape((Item(60, 65), Item(9, 14), Item(100, 105)), 5, group=3)
    for seed in range(3):
        whole = with_trees(make_case(shape, torch.float32, seed), seed)
        check_later_rows(whole, shape, 2, 3, window)


@pytest.mark.slow
def test_two_compiled_forms_serve_all_depths_of_a_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for ancestors of up to 32 bits, one for more: a graph of K depths has K - 1 of them."""
    shape = Shape((Item(9, 66), Item(100, 157)), 57, group=3)
    whole = with_trees(make_case(shape, torch.float32), seed=3)
    forms, kernel = set(), attention._attend

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **sizes: (
                forms.add(tuple(sizes.items())) or kernel[grid](*args, **sizes)
            )

    monkeypatch.setattr(attention, "_attend", Recorded())
    for first_row in range(1, 57, 8):
        check_later_rows(whole, shape, first_row, 8, window=None)
    assert len(forms) == 2


def check_later_rows(
    whole: Case, shape: Shape, first_row: int, size: int, window: int | None
) -> None:
    case = behind(whole, first_row, size)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])
    together = reference.paged_attention(whole.q, whole.keys, whole.values, whole.rows, window)
    together = together.view(len(shape.items), shape.rows_per_item, *together.shape[1:])
    together = together[:, first_row : first_row + size].flatten(0, 1)
    torch.testing.assert_close(expected, together, **TOLERANCE[torch.float32])


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(shape=shapes(), window=WINDOWS, seed=st.integers(0, 99))
@example(Shape((Item(100, 140),), 40, 3, 1, 16, 4, 1), None, 0)
@example(Shape((Item(100, 140),), 40, 3, 1, 16, 4, 1), 2, 0)
@example(Shape((Item(20, 84),), 64, 1, 1, 16, 4, 2), 9, 0)
def test_rows_of_trees_see_what_the_reference_lets_them_see(
    shape: Shape, window: int | None, seed: int
) -> None:
    case = with_trees(make_case(shape, torch.float32, seed), seed)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2)
@given(shape=shapes(), window=WINDOWS, seed=st.integers(0, 99), data=st.data())
def test_rows_that_items_share_see_what_they_see_among_all(
    shape: Shape, window: int | None, seed: int, data: st.DataObject
) -> None:
    size = shape.rows_per_item
    lengths = [data.draw(st.integers(1, size)) for _ in shape.items]
    if data.draw(st.booleans()):
        shape = replace(shape, rows_per_item=23, group=4)  # more than one tile
        lengths = [data.draw(st.sampled_from([1, 5, 23])) for _ in shape.items]
        size = 23
    ends = [min(i.end, i.start + n) for i, n in zip(shape.items, lengths, strict=True)]
    items = tuple(replace(i, end=end) for i, end in zip(shape.items, ends, strict=True))
    case = with_trees(make_case(replace(shape, items=items), torch.float32, seed), seed)
    given = [n * size + j for n, length in enumerate(lengths) for j in range(length)]
    index, starts = torch.tensor(given, device=DEVICE), [0, *itertools.accumulate(lengths)]
    rows = case.rows._replace(
        positions=case.rows.positions[index],
        slots=case.rows.slots[index],
        row_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
    )
    q = case.q[index].contiguous()
    among_all = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)[index]
    expected = reference.paged_attention(q, case.keys, case.values, rows, window)
    assert torch.equal(expected, among_all)
    ours = paged_attention(q, case.keys, case.values, rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])


@settings(max_examples=20)
@given(shape=shapes(capacity=24), window=st.none() | st.integers(1, 20), seed=st.integers(0, 99))
@example(Shape((Item(9, 18),), 9), 2, 0)
def test_the_reference_of_trees_is_the_definition(
    shape: Shape, window: int | None, seed: int
) -> None:
    case = with_trees(make_case(shape, torch.float64, capacity=24), seed)
    ours = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = attention_by_definition(case, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float64])


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_any_even_head_dimension_will_do(dim: int, dtype: torch.dtype) -> None:
    case = make_case(Shape((Item(70, 73),), 3, 2, 2, dim, 16, 2), dtype)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, None)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, None)
    torch.testing.assert_close(ours, expected, **TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "group", "splits", "window"),
    [(30, 3, 1, 40), (30, 3, 3, None), (17, 4, 1, None), (17, 4, 3, 40)],
)
def test_more_rows_than_a_tile_are_divided_over_programs(
    num_rows: int, group: int, splits: int, window: int | None
) -> None:
    assert tile(num_rows, group, 16, 1).block_m < num_rows * group
    items = (Item(100, 100 + num_rows), Item(0, 9))
    case = make_case(Shape(items, num_rows, group, 1, 16, 16, splits), torch.float32)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])


both = pytest.mark.parametrize(
    "attend", [paged_attention, reference.paged_attention], ids=["gpu", "reference"]
)


@pytest.mark.slow
def test_more_splits_than_the_merge_reads_at_once() -> None:
    shape = Shape((Item(1215, 1216), Item(2, 3)), 1, block_size=64, num_splits=19)
    case = make_case(shape, torch.float32, capacity=1216)
    last = case.rows.block_tables[case.rows.tables[0], -1]
    case.keys.unflatten(0, (-1, 64))[last] *= 3  # the highest score comes last
    ours = paged_attention(case.q, case.keys, case.values, case.rows, None)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, None)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "attend", [paged_attention, reference.paged_attention], ids=["gpu", "reference"]
)
@pytest.mark.parametrize("splits", [1, 3])
def test_an_item_that_only_pads_gives_zeros(attend: object, splits: int) -> None:
    case = make_case(Shape((Item(5, 7), PADDING), 2, 2, num_splits=splits), torch.float32)
    out = attend(case.q, case.keys, case.values, case.rows, None)  # type: ignore[operator]
    assert out[:2].isfinite().all()
    assert (out[2:] == 0).all()


@pytest.mark.parametrize(
    "attend", [paged_attention, reference.paged_attention], ids=["gpu", "reference"]
)
def test_rows_beyond_the_block_table_see_what_it_holds(attend: object) -> None:
    case = make_case(Shape((Item(6, 8),), 5), torch.float32, capacity=8)
    too_far = case.rows._replace(ends=case.rows.ends + 99)
    expected = attend(case.q, case.keys, case.values, case.rows, None)  # type: ignore[operator]
    out = attend(case.q, case.keys, case.values, too_far, None)  # type: ignore[operator]
    assert torch.equal(out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("splits", "kv_heads"), [(1, 2), (2, 2), (1, FEW_PROGRAMS + 1)])
def test_an_item_is_batch_invariant(splits: int, kv_heads: int, window: int | None) -> None:
    """Few programs or many: alone and together on one side of the border between their tiles."""
    items = (Item(140, 143), Item(1, 3), PADDING)
    case = make_case(Shape(items, 3, 3, kv_heads, 16, 4, splits), torch.float32)
    together = paged_attention(case.q, case.keys, case.values, case.rows, window)
    for i in range(len(items)):
        own = {name: getattr(case.rows, name)[i : i + 1] for name in ("tables", "starts", "ends")}
        own_rows = slice(3 * i, 3 * i + 3)
        alone = paged_attention(
            case.q[own_rows], case.keys, case.values, case.rows._replace(**own), window
        )
        assert torch.equal(alone, together[own_rows])


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2])
def test_results_go_where_the_caller_wants_them(splits: int) -> None:
    """A group of rows writes its part of the results of all rows."""
    case = make_case(Shape((Item(70, 73), PADDING), 3, 2, 2, 16, 4, splits), torch.float32)
    expected = paged_attention(case.q, case.keys, case.values, case.rows, None)
    of_all = torch.full((2 + len(case.q) + 1, *case.q.shape[1:]), 7.0, device=DEVICE)
    own = of_all[2:-1]
    out = paged_attention(case.q, case.keys, case.values, case.rows, None, out=own)
    assert out.data_ptr() == own.data_ptr()
    assert torch.equal(own, expected)
    assert (of_all[:2] == 7.0).all()
    assert (of_all[-1:] == 7.0).all()


def test_block_tables_may_be_the_first_columns_of_wider_ones() -> None:
    case = make_case(Shape((Item(9, 11), Item(3, 4)), 2), torch.float32, capacity=16)
    wide = torch.nn.functional.pad(case.rows.block_tables, (0, 3), value=2**20)
    narrow = case.rows._replace(block_tables=wide[:, :-3])
    expected = paged_attention(case.q, case.keys, case.values, case.rows, None)
    assert torch.equal(paged_attention(case.q, case.keys, case.values, narrow, None), expected)


@both
@pytest.mark.parametrize("splits", [1, 3])
def test_blocks_that_a_window_has_passed_are_not_read(attend: Any, splits: int) -> None:
    window, shape = 21, Shape((Item(100, 103), Item(37, 40), Item(2, 4)), 3, num_splits=splits)
    case = make_case(shape, torch.float32)
    expected = attend(case.q, case.keys, case.values, case.rows, window)
    for item, table in zip(shape.items, case.rows.tables.tolist(), strict=True):
        for position in range(max(item.start - window + 1, 0)):
            block = int(case.rows.block_tables[table, position // shape.block_size])
            slot = block * shape.block_size + position % shape.block_size
            case.keys[slot] = case.values[slot] = torch.nan
    assert torch.equal(attend(case.q, case.keys, case.values, case.rows, window), expected)


@pytest.mark.parametrize("window", [None, 6])
def test_the_reference_gives_what_the_engine_attention_gives(window: int | None) -> None:
    cache = PagedKVCache(CacheLayout(1, 2, 8), 44, torch.float32, torch.device("cpu"))
    blocks = random.Random(0).sample(range(10), 10)  # the eleventh is for padding
    tables = [BlockTable(4, range(0)), BlockTable(4, range(0))]
    for table, held in zip(tables, (blocks[:6], blocks[6:]), strict=True):
        for block in held:
            table.append(block)
    cache.keys.normal_()
    cache.values.normal_()
    # Five new rows of one sequence are two items of four; the last three rows only fill up.
    spans = [Span(0, 17, 5), Span(1, 8, 4)]
    items, real = (Item(17, 22), Item(21, 22), Item(8, 12)), [0, 1, 2, 3, 4, 8, 9, 10, 11]
    q = torch.randn(12, 4, 8)
    k, v = torch.randn(2, 9, 2, 8).unbind()
    attention = cache.attention(tables, spans)
    engine = attention(0, q[real], k, v, window)
    width = [t.blocks + [10] * (6 - len(t.blocks)) for t in tables]
    rows = make_rows(Shape(items, 4), torch.tensor(width), torch.tensor([0, 0, 1]))
    rows = rows._replace(**{n: getattr(rows, n).cpu() for n in rows._fields[:6]})
    expected = reference.paged_attention(q, cache.keys[0], cache.values[0], rows, window)
    torch.testing.assert_close(expected[real], engine, **TOLERANCE[torch.float32])


def test_splits_fill_the_gpu_and_only_where_the_context_is_long() -> None:
    assert choose_splits(1, 3, 64, 132) == 1  # a part is no shorter than a tile
    assert choose_splits(1, 3, 512, 132) == 8  # fine parts where few programs would run
    assert choose_splits(8, 3, 512, 132) == 4
    assert choose_splits(64, 3, 8192, 132) == 1  # the GPU is full
    assert choose_splits(8, 3, 100_000, 132) == 5  # all parts run at once


@given(
    num_rows=st.integers(1, 30),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 24, 128, 256]),
    programs=st.sampled_from([1, 16, 17]),
)
def test_a_tile_has_sides_that_a_matrix_product_takes(
    num_rows: int, group: int, dim: int, programs: int
) -> None:
    sizes = tile(num_rows, group, dim, programs)
    for side in (sizes.block_m, sizes.block_n, sizes.block_d):
        assert side >= 16
        assert side & (side - 1) == 0
    assert sizes.block_d >= dim


@given(group=st.integers(1, 8), dim=st.sampled_from([64, 128]), kv_heads=st.integers(1, 16))
def test_one_request_has_one_tile_of_keys_with_drafts_and_without(
    group: int, dim: int, kv_heads: int
) -> None:
    assert len({tile(num_rows, group, dim, kv_heads).block_n for num_rows in range(1, 40)}) == 1


SMOL, LARGE = (3, 3, 64), (4, 8, 128)  # group, key-value heads, head dimension


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "splits", "window"),
    [(1, 1, None), (1, 20, None), (8, 1, 1000), (8, 4, None), (17, 4, 1000), (30, 1, None)],
)
@pytest.mark.parametrize(("group", "kv_heads", "dim"), [SMOL, LARGE], ids=["smol", "large"])
def test_bf16_agrees_at_realistic_sizes(
    group: int, kv_heads: int, dim: int, num_rows: int, splits: int, window: int | None
) -> None:
    starts = (8000, 4095, 700, 0)
    items = (*(Item(start, start + num_rows) for start in starts), PADDING)
    shape = Shape(items, num_rows, group, kv_heads, dim, 16, splits)
    case = make_case(shape, torch.bfloat16, capacity=8192)
    ours = paged_attention(case.q, case.keys, case.values, case.rows, window)
    expected = reference.paged_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(ours, expected, **TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_a_captured_graph_follows_the_rows_it_reads(splits: int) -> None:
    case = make_case(Shape((Item(90, 98),) * 2, 8, 3, 3, 64, 16, splits), torch.bfloat16)
    rows = case.rows
    paged_attention(case.q, case.keys, case.values, rows, None)  # compiles
    torch.cuda.synchronize(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(case.q, case.keys, case.values, rows, None)
    rows.starts.copy_(torch.tensor([3, 40]))
    rows.ends.copy_(torch.tensor([11, 48]))
    graph.replay()
    assert torch.equal(out, paged_attention(case.q, case.keys, case.values, rows, None))

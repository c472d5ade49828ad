"""Claim: under the batch-invariant policy a row has the same bits whatever stands beside it.

Without a GPU a tensor core is imitated: it adds a few products at a time to a float32 sum, in order
of k. So the tests see the order of sums, not how NumPy multiplies. That the two instructions which
Triton chooses between by the rows of a tile round alike only a GPU can show.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from triton.runtime import interpreter

from peagle.config import EngineConfig
from peagle.errors import ConfigError
from peagle.kernels.gpu import linear
from peagle.kernels.gpu.attention import batch_invariant_splits, keys_of_a_part, paged_attention
from peagle.kernels.gpu.best_token import best_tokens
from peagle.kernels.gpu.linear import (
    LinearTile,
    batch_invariant_tile,
    fused_linear,
    invariant_logits,
)
from peagle.kernels.gpu.norms import rms_norm, weigh_rows
from peagle.kernels.policy import BATCH_INVARIANT, FAST, Policy
from peagle.kernels.reference import linear as reference
from peagle.kernels.reference.attention import paged_attention as reference_attention
from peagle.kernels.reference.linear import Norm
from peagle.kernels.rows import PagedRows, RowGroups
from peagle.models import fused, layers
from peagle.models.attention import RowsAttention
from peagle.models.binding import bind_kernels
from peagle.models.config import DecoderConfig
from peagle.models.target import TargetModel
from tests.kernels.gpu.paged_cases import DEVICE, TOLERANCE, Case, Item, Shape, make_case
from tests.tiny.models import UNEVEN, randomise

ON_GPU = DEVICE.type == "cuda"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # NumPy knows no bfloat16


def tensor_core(_: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """A tile's dot, 16 products at a time."""
    step = 16
    x, y, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for k in range(0, x.shape[1], step):
        total = (total + x[:, k : k + step] @ y[k : k + step]).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", tensor_core)


@pytest.fixture
def _all_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MAX_SMALL_WEIGHT", 0)


def draw(*shape: int, seed: int, dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


# --- products

# Outputs and inputs that have different parts of sums: see `_kind` in linear.py.
WEIGHTS = {"short": (40, 136), "wide": (656, 72), "long": (24, 1040)}
FEW_AND_MANY = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 512, 513)
ROWS = {"short": (1, 16, 17, 33, 129, 513), "wide": (1, 17), "long": (1, 17, 129)}


def products(
    x: Tensor, outputs: int, *, gated: bool, extras: bool, policy: Policy = BATCH_INVARIANT
) -> Tensor:
    """Of x, and rows of a residual that follow from it."""
    inputs = x.shape[1]
    results = outputs // 2 if gated else outputs
    weight = draw(outputs, inputs, seed=1) * inputs**-0.5
    return fused_linear(
        x,
        weight,
        draw(outputs, seed=2) if extras else None,
        norm=Norm(1 + 0.3 * draw(inputs, seed=3), 1e-5) if extras else None,
        residual=x[:, :1].expand(-1, results).contiguous() if extras else None,
        gated=gated,
        policy=policy,
    )


def check_products(kind: str, gated: bool, extras: bool) -> None:
    outputs, inputs = WEIGHTS[kind]
    # The interpreter is slow: the most rows with all of it or with nothing.
    counts = [n for n in ROWS[kind] if n <= 129 or extras == gated]
    x = draw(max(counts), inputs, seed=0)
    whole = products(x, outputs, gated=gated, extras=extras)
    for rows in counts[:-1]:
        first = (7 * rows) % (len(x) - rows + 1)
        part = x[first : first + rows].contiguous()
        ours = products(part, outputs, gated=gated, extras=extras)
        assert torch.equal(ours, whole[first : first + rows]), rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("extras", [False, True])
def test_a_product_gives_a_row_the_same_bits_beside_any_others(
    kind: str, gated: bool, extras: bool
) -> None:
    check_products(kind, gated, extras)


@pytest.mark.usefixtures("_all_weights_are_large")
@pytest.mark.parametrize("kind", ["short", "long"])
@pytest.mark.parametrize("gated", [False, True])
def test_so_does_one_of_a_large_weight(kind: str, gated: bool) -> None:
    check_products(kind, gated, extras=False)


def test_the_fast_policy_does_not() -> None:
    """That the test above can fail."""
    x = draw(64, 136, seed=0)
    whole = products(x, 40, gated=True, extras=False, policy=FAST)
    alone = products(x[:1], 40, gated=True, extras=False, policy=FAST)
    assert not torch.equal(alone, whole[:1])


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_products_agree_with_the_reference(rows: int, gated: bool, dtype: torch.dtype) -> None:
    x, weight = draw(rows, 72, seed=0, dtype=dtype), draw(80, 72, seed=1, dtype=dtype) * 72**-0.5
    bias, norm = draw(80, seed=2, dtype=dtype), Norm(draw(72, seed=3, dtype=dtype), 1e-5)
    ours = fused_linear(
        x, weight, bias, norm=norm, residual=None, gated=gated, policy=BATCH_INVARIANT
    )
    theirs = reference.fused_linear(x, weight, bias, norm=norm, residual=None, gated=gated)
    torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


@given(
    outputs=st.integers(1, 30_000),
    inputs=st.integers(1, 15_000),
    gated=st.booleans(),
    itemsize=st.sampled_from([2, 4]),
)
def test_a_sum_has_no_parts_whatever_the_rows(
    outputs: int, inputs: int, gated: bool, itemsize: int
) -> None:
    """It goes on from turn to turn, however many inputs a turn has."""
    for rows in (*FEW_AND_MANY, 1024, 4096):
        tile = batch_invariant_tile(rows, outputs, inputs, gated, itemsize)
        assert tile.sums == 1
        assert tile.rows < 64 or tile.warps in (4, 8)  # wgmma works with groups of four warps


@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_both_instructions_add_up_a_chain_alike(spread: float) -> None:
    x, weight = draw(64, 2048, seed=0).float(), draw(1024, 2048, seed=1).float()
    x = (x * torch.exp(spread * draw(64, 2048, seed=2).float())).to(HALF)
    sums = [
        linear._product(
            x, weight.to(HALF), None, None, None, None, False, torch.float32,
            LinearTile(rows, 64, inputs, warps=4, stages=3),
        )
        for rows, inputs in ((16, 128), (32, 64), (64, 64), (128, 32))
    ]  # fmt: skip
    assert all(torch.equal(other, sums[0]) for other in sums[1:])


@pytest.mark.parametrize("part", [16, 32, 128])
def test_a_norm_begun_apart_is_that_of_the_product(part: int) -> None:
    x, weight = draw(5, 136, seed=0), 1 + 0.3 * draw(136, seed=1)
    weighed, scales = weigh_rows(x, weight, 1e-5, part)
    assert torch.equal(weighed, (x.float() * weight.float()).to(x.dtype))
    expected = (x.double().square().mean(1) + 1e-5).rsqrt().float()
    torch.testing.assert_close(scales, expected)
    normed = weighed.float() * scales[:, None]
    torch.testing.assert_close(normed, rms_norm(x, weight, 1e-5).float(), atol=2e-2, rtol=2e-2)


# --- the output product


def near_ties(vocab_size: int, inputs: int) -> Tensor:
    """A table whose columns differ in one small number each: the order of sums decides."""
    table = draw(1, inputs, seed=5).repeat(vocab_size, 1)
    places = torch.arange(vocab_size, device=DEVICE)
    table[places, places % inputs] *= 1.001
    return table


@pytest.mark.slow
def test_logits_and_best_tokens_are_the_same_alone_and_beside_others() -> None:
    hidden, table = draw(66, 136, seed=0), near_ties(300, 136)
    logits, best = invariant_logits(hidden, table), best_tokens(hidden, table, None).token_ids
    assert torch.equal(best, logits.argmax(1))
    for rows in (slice(0, 1), slice(3, 36)):
        part = hidden[rows].contiguous()
        assert torch.equal(invariant_logits(part, table), logits[rows])
        assert torch.equal(best_tokens(part, table, None).token_ids, best[rows])
    exact = hidden.double() @ table.double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-3)


# --- attention


def attend(case: Case, rows: PagedRows, window: int | None) -> Tensor:
    q = case.q[: len(rows.starts) * rows.rows_per_item]
    return paged_attention(q, case.keys, case.values, rows, window, BATCH_INVARIANT)


def row_alone(case: Case, item: int, j: int, window: int | None, num_splits: int) -> Tensor:
    """Row j of an item as an item of its own, which ends behind it."""
    rows, own = case.rows, slice(item, item + 1)
    start = rows.starts[own] + j
    ends = torch.where(rows.ends[own] > 0, torch.minimum(rows.ends[own], start + 1), 0)
    alone = rows._replace(
        tables=rows.tables[own], starts=start, ends=ends, rows_per_item=1, num_splits=num_splits
    )
    place = item * rows.rows_per_item + j
    q = case.q[place : place + 1]
    return paged_attention(q, case.keys, case.values, alone, window, BATCH_INVARIANT)[0]


@pytest.mark.slow
@settings(max_examples=6)
@given(
    items=st.lists(st.integers(0, 190), min_size=1, max_size=2),
    num_rows=st.integers(1, 20),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 100),
    more_splits=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_a_row_attends_alike_alone_among_others_and_with_any_splits(
    items: list[int],
    num_rows: int,
    group: int,
    window: int | None,
    more_splits: int,
    seed: int,
) -> None:
    shape = Shape(
        tuple(Item(start, start + num_rows) for start in items), num_rows, group, 1, 16, 16
    )
    case = make_case(shape, HALF, seed, capacity=224)
    parts = -(-(max(items) + num_rows) // keys_of_a_part(16)) + more_splits
    together = attend(case, case.rows, window)
    assert torch.equal(attend(case, case.rows._replace(num_splits=parts), window), together)
    expected = reference_attention(case.q, case.keys, case.values, case.rows, window)
    torch.testing.assert_close(together, expected, **TOLERANCE[HALF])
    for item in range(len(items)):
        for j in {0, num_rows // 2, num_rows - 1}:
            whole = together[item * num_rows + j]
            assert torch.equal(row_alone(case, item, j, window, 1), whole)
            assert torch.equal(row_alone(case, item, j, window, parts), whole)


def test_too_few_splits_lose_no_keys() -> None:
    case = make_case(Shape((Item(200, 203),), 3, 2, 1, 16, 16, num_splits=2), HALF, capacity=208)
    expected = reference_attention(case.q, case.keys, case.values, case.rows, None)
    torch.testing.assert_close(attend(case, case.rows, None), expected, **TOLERANCE[HALF])


def test_a_part_far_below_the_others_adds_nothing() -> None:
    """Its share would be a power of two that float32 does not have."""
    case = make_case(Shape((Item(100, 101),), 1, 1, 1, 16, 16), torch.float32, capacity=112)
    block = case.rows.block_tables[case.rows.tables[0], 6]
    case.keys.unflatten(0, (-1, 16))[block, 3] = 100.0 * case.q[0]
    outs = [attend(case, case.rows._replace(num_splits=n), None) for n in (1, 2, 5)]
    expected = reference_attention(case.q, case.keys, case.values, case.rows, None)
    for out in outs:
        assert torch.equal(out, outs[0])
        torch.testing.assert_close(out, expected, **TOLERANCE[torch.float32])


def test_splits_hold_the_context_unless_the_gpu_is_full() -> None:
    assert batch_invariant_splits(1, 3, 64, 512, 132) == 8
    assert batch_invariant_splits(1, 3, 64, 513, 132) == 9
    assert batch_invariant_splits(32, 3, 64, 1024, 132) == 16
    assert batch_invariant_splits(256, 3, 64, 2048, 132) == 1
    assert batch_invariant_splits(1, 8, 128, 131_072, 132) == 2048
    assert batch_invariant_splits(1, 8, 256, 64, 132) == 2


# --- a whole model

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2 if ON_GPU else 1,  # the interpreter is slow
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "biases": Qwen2Config(**SIZES),
    "norms of queries and keys": Qwen3Config(**SIZES),
}
BLOCK, BLOCKS, SEQUENCES = 16, 8, 3
SLOTS = BLOCK * BLOCKS * SEQUENCES + 1
Rows = tuple[int, int, int]  # sequence, start, number of rows


def half_model(name: str) -> TargetModel:
    model = TargetModel(DecoderConfig.from_transformers(MODELS[name]))
    randomise(model)
    half = copy.deepcopy(model).to(DEVICE, HALF).requires_grad_(False).eval()
    half.rotary.cos, half.rotary.sin = (t.to(DEVICE) for t in (model.rotary.cos, model.rotary.sin))
    return half


def plan(items: Sequence[Rows], width: int, num_splits: int) -> PagedRows:
    """Rows beyond an item's own go to the padding slot."""
    tables, starts, lengths = (torch.tensor(column) for column in zip(*items, strict=True))
    offsets = torch.arange(width)
    positions = (starts[:, None] + offsets).clamp(max=BLOCK * BLOCKS - 1)
    slots = tables[:, None] * BLOCK * BLOCKS + positions
    slots[offsets >= lengths[:, None]] = SLOTS - 1
    block_tables = torch.arange(SEQUENCES * BLOCKS).view(SEQUENCES, BLOCKS)
    numbers = (t.int().to(DEVICE) for t in (block_tables, tables, starts, starts + lengths))
    places = (t.flatten().to(DEVICE) for t in (positions, slots))
    return PagedRows(*numbers, *places, width, BLOCK, num_splits)


class Server:
    """A model over an empty cache, step by step."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model
        config = model.config
        shape = (2, config.num_hidden_layers, SLOTS, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = torch.full(shape, torch.nan, dtype=HALF, device=DEVICE)

    def step(self, items: Sequence[Rows], num_splits: int = 1) -> Tensor:
        """Hidden states and logits of the first item's rows, side by side."""
        width = max(length for _, _, length in items)
        rows = plan(items, width, num_splits)
        tokens = (rows.positions * 7 + rows.tables.repeat_interleave(width)) % 48
        groups = RowGroups(rows.positions, rows.slots, [rows])
        attention = RowsAttention([groups] * len(self.keys), self.keys, self.values)
        with torch.inference_mode():
            hidden = self.model(tokens, rows.positions, attention).hidden
            found = torch.cat((hidden.float(), self.model.logits(hidden)), dim=1)
        return found[: items[0][2]]

    def prefill(self, sequence: int, length: int, chunk: int) -> None:
        for start in range(0, length, chunk):
            self.step([(sequence, start, min(chunk, length - start))])


@pytest.fixture
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter too, and the norms of its dtype inside, as bfloat16's are."""
    for module in fused, layers:
        monkeypatch.setattr(module, "gpu_takes", lambda x: True)
    monkeypatch.setattr(Policy, "norms_inside", lambda *_: True)


@pytest.mark.slow
@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize("name", MODELS if ON_GPU else ["llama"])  # the interpreter is slow
def test_a_sequence_has_the_same_bits_however_it_is_served(name: str) -> None:
    """Four rows across the border of two parts: one at a time, at once, beside others, inside a
    prompt; the prompt before them in pieces of different sizes."""
    model = half_model(name)
    model.bind(BATCH_INVARIANT)
    alone, at_once, beside, prompt = (Server(model) for _ in range(4))
    for server, chunk in ((alone, 16), (at_once, 62), (beside, 30)):
        server.prefill(0, 62, chunk)
    prompt.keys, prompt.values = at_once.keys.clone(), at_once.values.clone()
    beside.prefill(1, 20, 20)
    expected = torch.cat([alone.step([(0, 62 + n, 1)], 1 + n % 2) for n in range(4)])
    assert torch.equal(at_once.step([(0, 62, 4)]), expected)
    others = [(1, 20, 4), (2, 0, 3), (2, 3, 4)]
    assert torch.equal(beside.step([(0, 62, 4), *others], 3), expected)
    assert torch.equal(prompt.step([(0, 62, 4), (1, 0, 40)]), expected)
    assert torch.equal(alone.keys[:, :66], beside.keys[:, :66])
    assert torch.equal(alone.values[:, :66], prompt.values[:, :66])


@pytest.mark.usefixtures("_with_kernels")
def test_a_copy_of_a_model_keeps_its_policy() -> None:
    model = half_model("llama")
    model.bind(BATCH_INVARIANT)
    copied = copy.deepcopy(model)
    assert copied.policy == copied._fused._policy == BATCH_INVARIANT
    assert torch.equal(Server(copied).step([(0, 0, 5)]), Server(model).step([(0, 0, 5)]))


# --- what is refused


def test_quantised_targets_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(batch_invariant=True, quantization="fp8")


def test_a_model_on_a_cpu_is_refused_and_otherwise_bound() -> None:
    model = UNEVEN.make_target(torch.float32)
    with pytest.raises(ConfigError, match="GPU"):
        bind_kernels(model, batch_invariant=True)
    bind_kernels(model)
    assert model.policy == FAST

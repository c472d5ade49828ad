"""A model's layers run by the GPU's kernels give what their modules give."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from peagle.kernels.gpu import layers as gpu_layers
from peagle.kernels.policy import BATCH_INVARIANT, FAST
from peagle.kernels.rows import PagedRows, RowGroups
from peagle.models import fused
from peagle.models.attention import RowsAttention
from peagle.models.config import DecoderConfig
from peagle.models.eagle import EagleNetwork
from peagle.models.target import TargetModel
from tests.tiny.models import UNEVEN, randomise
from tests.tolerance import near

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CASES = {
    "llama": LlamaConfig(**SIZES),
    "all biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "norms of queries and keys": Qwen3Config(**SIZES),
    "sliding window": MistralConfig(**SIZES, sliding_window=2),
}
AUX_LAYERS = (0, 1, 2)
BLOCK_SIZE, BLOCKS_EACH, SEQUENCES = 2, 4, 2
NUM_SLOTS = BLOCK_SIZE * BLOCKS_EACH * SEQUENCES + 1  # the last is the padding slot
BLOCK_TABLES = torch.randperm(
    BLOCKS_EACH * SEQUENCES, generator=torch.Generator().manual_seed(0)
).reshape(SEQUENCES, BLOCKS_EACH)


class Part(NamedTuple):
    """New rows of one sequence."""

    sequence: int
    start: int
    length: int


Groups = Sequence[Sequence[Part]]  # those of one pass; the items of each have one size

# Two steps: the second reads what the first one wrote. Items have different lengths.
STEPS: tuple[Groups, ...] = (
    [[Part(0, 0, 3), Part(1, 0, 2)]],
    [[Part(1, 2, 1), Part(0, 3, 2)]],
)
# Newest tokens, with a draft or without, and behind them the prompts: the first step has all of
# sequence 0's prompt beside its newest token, which reads it; the second goes on with both.
STEPS_WITH_PROMPTS: tuple[Groups, ...] = (
    [[Part(0, 4, 1), Part(1, 0, 2)], [Part(0, 0, 3), Part(0, 3, 1)]],
    [[Part(1, 5, 1), Part(0, 5, 2)], [Part(1, 2, 3)]],
)


FORMS = {  # whatever the number of rows is
    "few rows": FAST,
    "norms apart": dataclasses.replace(FAST, max_normed_rows=0),
    "many rows": dataclasses.replace(FAST, max_fused_rows=0),
    "batch-invariant": BATCH_INVARIANT,
}


def paged_rows(parts: Sequence[Part], num_splits: int, device: torch.device) -> PagedRows:
    width = max(part.length for part in parts)
    offsets = torch.arange(width)
    starts = torch.tensor([part.start for part in parts])
    lengths = torch.tensor([part.length for part in parts])
    tables = torch.tensor([part.sequence for part in parts])
    positions = starts[:, None] + offsets  # [I, Q]
    blocks = BLOCK_TABLES[tables].gather(1, (positions // BLOCK_SIZE).clamp(max=BLOCKS_EACH - 1))
    slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    slots[offsets >= lengths[:, None]] = NUM_SLOTS - 1
    tensors = (BLOCK_TABLES.int(), tables.int(), starts.int(), (starts + lengths).int())
    rows = (positions.flatten(), slots.flatten())
    on_device = (tensor.to(device) for tensor in (*tensors, *rows))
    return PagedRows(*on_device, width, BLOCK_SIZE, num_splits)


def row_groups(groups: Groups, num_splits: int, device: torch.device) -> RowGroups:
    """As the engine makes them: each group's positions and slots are part of those of all rows."""
    parts = [paged_rows(group, num_splits, device) for group in groups]
    positions = torch.cat([part.positions for part in parts])
    slots = torch.cat([part.slots for part in parts])
    sizes = [len(part.slots) for part in parts]
    own = zip(parts, positions.split(sizes), slots.split(sizes), strict=True)
    return RowGroups(positions, slots, [p._replace(positions=a, slots=b) for p, a, b in own])


def real_rows(groups: Groups) -> Tensor:
    rows: list[int] = []
    first = 0
    for group in groups:
        width = max(part.length for part in group)
        for part in group:
            rows += range(first, first + part.length)
            first += width
    return torch.tensor(rows)


def serve(
    model: nn.Module,
    layout: tuple[int, int, int],  # layers, key-value heads, head dimension
    forward: Callable[[RowGroups, RowsAttention], Tensor],
    num_splits: int = 1,
    steps: Sequence[Groups] = STEPS,
) -> Tensor:
    """What `forward` gives for every real row of the steps, over a cache of unwritten entries."""
    weight = next(model.parameters())
    layers, heads, dim = layout
    shape = (2, layers, NUM_SLOTS, heads, dim)
    keys, values = torch.full(shape, torch.nan, dtype=weight.dtype, device=weight.device)
    found = []
    with torch.inference_mode():
        for groups in steps:
            rows = row_groups(groups, num_splits, weight.device)
            out = forward(rows, RowsAttention([rows] * len(keys), keys, values))
            found.append(out[real_rows(groups).to(out.device)].float().cpu())
    return torch.cat(found)


def aux_hidden_states_of(model: TargetModel, **options: Any) -> Tensor:
    config = model.config

    def forward(rows: RowGroups, attention: RowsAttention) -> Tensor:
        tables = [g.tables.repeat_interleave(g.rows_per_item) for g in rows.groups]
        tokens = (rows.positions * 7 + torch.cat(tables)) % 40
        aux_hidden_states = model(tokens, rows.positions, attention, AUX_LAYERS).aux_hidden_states
        assert aux_hidden_states is not None
        return aux_hidden_states  # type: ignore[no-any-return]

    layout = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return serve(model, layout, forward, **options)


def drafter_states(network: EagleNetwork, **options: Any) -> Tensor:
    config = network.config
    table = torch.randn(2, 64, config.hidden_size, generator=torch.Generator().manual_seed(3))

    def forward(rows: RowGroups, attention: RowsAttention) -> Tensor:
        weight = network.fc.weight
        embeddings, features = table.to(weight.device, weight.dtype)[:, rows.positions]
        out: Tensor = network(embeddings, features, rows.positions, attention)
        return out

    layout = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    return serve(network, layout, forward, **options)


def small(name: str) -> TargetModel:
    model = TargetModel(DecoderConfig.from_transformers(CASES[name]))
    randomise(model)
    return model.requires_grad_(False).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call: equal results say nothing if the modules ran on both sides."""
    rows: list[int] = []
    run = gpu_layers.run_layers

    def counted(layers: Any, x: Tensor, *rest: Any) -> list[Tensor]:
        rows.append(len(x))
        return run(layers, x, *rest)

    monkeypatch.setattr(gpu_layers, "run_layers", counted)
    return rows


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to let the layers go through the kernels, on the CPU in Triton's interpreter."""
    return lambda: monkeypatch.setattr(fused, "gpu_takes", lambda x: True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_a_targets_layers_agree_with_their_modules(
    name: str,
    form: str,
    device: torch.device,
    calls: list[int],
    with_kernels: Callable[[], None],
) -> None:
    model = small(name)
    expected = aux_hidden_states_of(model)
    assert not calls
    with_kernels()
    model.to(device).bind(FORMS[form])
    ours = aux_hidden_states_of(model)
    assert calls == [6, 4]
    torch.testing.assert_close(ours, expected, **near(expected, terms=50, depth=3))


@pytest.mark.slow
def test_splits_of_long_contexts_change_nothing_but_the_order_of_sums(
    device: torch.device, with_kernels: Callable[[], None], calls: list[int]
) -> None:
    model = small("llama").to(device)
    with_kernels()
    split, whole = aux_hidden_states_of(model, num_splits=2), aux_hidden_states_of(model)
    torch.testing.assert_close(split, whole, **near(whole, terms=50, depth=3))
    assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"attention_bias": True}])
def test_a_drafters_layers_agree_with_their_modules(
    changes: dict[str, Any],
    form: str,
    device: torch.device,
    calls: list[int],
    with_kernels: Callable[[], None],
) -> None:
    network = UNEVEN.make_head(UNEVEN.make_target(torch.float32), head_dim=8, **changes)
    expected = drafter_states(network)
    assert not calls
    with_kernels()
    network.to(device).bind(FORMS[form])
    ours = drafter_states(network)
    assert calls == [6, 4]
    torch.testing.assert_close(ours, expected, **near(expected, terms=50, depth=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norms of queries and keys", "sliding window"])
@pytest.mark.parametrize("form", FORMS)
def test_prompts_beside_newest_tokens_agree_with_the_modules(
    name: str,
    form: str,
    device: torch.device,
    calls: list[int],
    with_kernels: Callable[[], None],
) -> None:
    """Two groups of rows in one pass, one sequence in both."""
    model = small(name)
    expected = aux_hidden_states_of(model, steps=STEPS_WITH_PROMPTS)
    assert not calls
    with_kernels()
    model.to(device).bind(FORMS[form])
    ours = aux_hidden_states_of(model, steps=STEPS_WITH_PROMPTS)
    assert calls == [10, 7]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_drafters_prompts_beside_new_rows_agree_with_the_modules(
    device: torch.device, calls: list[int], with_kernels: Callable[[], None]
) -> None:
    network = UNEVEN.make_head(UNEVEN.make_target(torch.float32), head_dim=8)
    expected = drafter_states(network, steps=STEPS_WITH_PROMPTS)
    with_kernels()
    ours = drafter_states(network.to(device), steps=STEPS_WITH_PROMPTS)
    assert calls == [10, 7]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_rows_in_two_groups_give_what_one_group_gives() -> None:
    """In the modules: the order of groups is not the order of positions."""
    model = small("llama")
    apart = aux_hidden_states_of(model, steps=STEPS_WITH_PROMPTS)
    together = aux_hidden_states_of(model, steps=[[[Part(0, 0, 7), Part(1, 0, 6)]]])
    places = [
        (p.sequence, p.start + n)
        for groups in STEPS_WITH_PROMPTS
        for group in groups
        for p in group
        for n in range(p.length)
    ]
    order = [position if sequence == 0 else 7 + position for sequence, position in places]
    torch.testing.assert_close(apart, together[order], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_sequence_has_the_same_bits_alone_and_beside_others(
    device: torch.device, with_kernels: Callable[[], None], calls: list[int]
) -> None:
    model = small("llama").to(device)
    with_kernels()
    together = aux_hidden_states_of(model, steps=[[[Part(0, 0, 3), Part(1, 0, 2)]]])
    alone = aux_hidden_states_of(model, steps=[[[Part(1, 0, 2)]]])
    assert torch.equal(together[3:], alone)
    assert calls == [6, 2]


@pytest.mark.slow
def test_weights_that_are_replaced_are_seen(
    device: torch.device, with_kernels: Callable[[], None], calls: list[int]
) -> None:
    model = small("llama").to(device)
    with_kernels()
    before = aux_hidden_states_of(model, steps=STEPS[:1])
    o_proj = model.layers[1].self_attn.o_proj
    o_proj.weight = nn.Parameter(o_proj.weight * 2, requires_grad=False)
    assert not torch.equal(before, aux_hidden_states_of(model, steps=STEPS[:1]))
    assert len(calls) == 2


@pytest.mark.slow
def test_weights_that_are_replaced_after_binding_are_not_looked_for(
    device: torch.device, with_kernels: Callable[[], None]
) -> None:
    model = small("llama").to(device)
    with_kernels()
    model.bind(FAST)
    before = aux_hidden_states_of(model, steps=STEPS[:1])
    o_proj = model.layers[1].self_attn.o_proj
    o_proj.weight = nn.Parameter(o_proj.weight * 2, requires_grad=False)
    assert torch.equal(before, aux_hidden_states_of(model, steps=STEPS[:1]))
    model.bind(FAST)
    assert not torch.equal(before, aux_hidden_states_of(model, steps=STEPS[:1]))


def test_column_major_weights_are_left_to_the_modules(
    device: torch.device, with_kernels: Callable[[], None], calls: list[int]
) -> None:
    model = small("llama").to(device)
    expected = aux_hidden_states_of(model)
    weight = model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.t().contiguous().t()
    with_kernels()
    calls.clear()
    torch.testing.assert_close(
        aux_hidden_states_of(model), expected, **near(expected, terms=50, depth=3)
    )
    assert not calls


def in_bfloat16(model: TargetModel, device: torch.device) -> TargetModel:
    """As a checkpoint is loaded: the angles stay float32."""
    half = copy.deepcopy(model).to(device, torch.bfloat16)
    half.rotary.cos, half.rotary.sin = (t.to(device) for t in (model.rotary.cos, model.rotary.sin))
    return half


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_layers_agree_with_float32_modules(
    name: str,
    form: str,
    device: torch.device,
    calls: list[int],
) -> None:
    model = small(name).bfloat16().float()  # weights that bfloat16 holds
    expected = aux_hidden_states_of(model)
    half = in_bfloat16(model, device)
    half.bind(FORMS[form])
    ours = aux_hidden_states_of(half)
    torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.08)
    assert calls == [6, 4]


@pytest.mark.gpu
def test_the_layers_can_be_captured_in_a_graph(device: torch.device) -> None:
    model = in_bfloat16(small("llama"), device)
    rows = row_groups(STEPS_WITH_PROMPTS[0], 2, device)
    keys, values = torch.zeros(2, 2, NUM_SLOTS, 2, 16, dtype=torch.bfloat16, device=device)
    tokens = rows.positions % model.config.vocab_size

    def step() -> Tensor:
        hidden = model(
            tokens, rows.positions, RowsAttention([rows] * len(keys), keys, values)
        ).hidden
        return model.logits(hidden)

    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            expected = step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 65])
def test_logits_of_half_weights_are_float32_sums(device: torch.device, num_rows: int) -> None:
    model = small("llama").to(device, torch.bfloat16)
    hidden = torch.randn(num_rows, 36, device=device, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model.logits(hidden)
    exact = (hidden.double() @ model.lm_head.weight.double().t()).float()
    torch.testing.assert_close(logits, exact, **near(exact, terms=36))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 65])
def test_a_drafters_logits_include_its_norm(device: torch.device, num_rows: int) -> None:
    network = UNEVEN.make_head(UNEVEN.make_target(torch.float32), head_dim=8)
    hidden = torch.randn(num_rows, 32)
    with torch.inference_mode():
        expected = network.logits(hidden)
        network.shared.lm_head.to(device)
        ours = network.to(device).logits(hidden.to(device))
        torch.testing.assert_close(ours.cpu(), expected, **near(expected, terms=32))

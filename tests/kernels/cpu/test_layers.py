"""The layer kernel gives what the layer's modules give, to the bit, and is batch-invariant."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from peagle.engine.blocks import BlockTable
from peagle.engine.kv_cache import PagedKVCache
from peagle.kernels.cpu import layers as kernel_module
from peagle.kernels.cpu.layers import LayersKernel, kernel_takes, layers_function
from peagle.kernels.cpu.linear import unpacked
from peagle.models import fused
from peagle.models.attention import causal_attention
from peagle.models.binding import pack_weights
from peagle.models.config import DecoderConfig
from peagle.models.drafter import CacheLayout, Span
from peagle.models.layers import matrix_of
from peagle.models.target import TargetModel, TargetOutput
from tests.kernels.cpu.compiler import needs_kernels
from tests.tiny.models import UNEVEN
from tests.tolerance import near

pytestmark = needs_kernels

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CASES = {
    "llama": LlamaConfig(**SIZES),
    "all biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "norms of queries and keys": Qwen3Config(**SIZES),
    "sliding window": MistralConfig(**SIZES, sliding_window=5),
}
AUX_LAYERS = (0, 1, 2, 3)
LENGTH = 21


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every call of the kernel: equal bits say nothing if the modules ran."""
    rows: list[int] = []
    call = LayersKernel.__call__

    def counted(self: LayersKernel, x: Tensor, *rest: Any) -> Tensor:
        rows.append(len(x))
        return call(self, x, *rest)

    monkeypatch.setattr(LayersKernel, "__call__", counted)
    return rows


@pytest.fixture
def modules_only() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "kernel_takes", lambda x: False)
        yield patch


def unbound(config: PretrainedConfig) -> TargetModel:
    torch.manual_seed(0)
    model = TargetModel(DecoderConfig.from_transformers(config))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.requires_grad_(False).eval()


def small(name: str) -> TargetModel:
    return packed(CASES[name])


def packed(config: PretrainedConfig) -> TargetModel:
    model = unbound(config)
    pack_weights(model)
    return model


def tokens(sequence: int) -> Tensor:
    return (torch.arange(LENGTH) * (sequence + 3)) % 40


class Served:
    """Sequences over one paged cache, in steps of the caller's choice."""

    def __init__(self, model: TargetModel, num_sequences: int = 1) -> None:
        self.model = model
        self.tables = [BlockTable(4, range(0)) for _ in range(num_sequences)]
        for number in range(6 * num_sequences):  # the sequences' blocks alternate
            self.tables[number % num_sequences].append(number)
        slots = 4 * 6 * num_sequences
        self.cache = PagedKVCache(model.cache_layout, slots, torch.float32, torch.device("cpu"))
        self.cache.keys.fill_(float("nan"))  # nothing unwritten may be read
        self.cache.values.fill_(float("nan"))

    def step(self, spans: Sequence[Span]) -> Tensor:
        attention = self.cache.attention(self.tables, spans)
        rows = torch.cat([tokens(s.sequence)[s.start : s.start + s.length] for s in spans])
        out = self.model(rows, attention.positions, attention, AUX_LAYERS).aux_hidden_states
        assert out is not None
        return out


def all_rows(model: TargetModel, steps: Sequence[int]) -> Tensor:
    """Taps of a sequence that is served in steps of these lengths."""
    served, start, parts = Served(model), 0, []
    for length in steps:
        parts.append(served.step([Span(0, start, length)]))
        start += length
    assert start == LENGTH
    return torch.cat(parts)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_float64(name: str, calls: list[int]) -> None:
    model = small(name)
    ours = all_rows(model, [8, 1, 5, 7])
    assert calls == [8, 1, 5, 7]
    positions = torch.arange(LENGTH)
    exact_model = unbound(CASES[name]).double()
    exact = exact_model(
        tokens(0), positions, causal_attention(positions), AUX_LAYERS
    ).aux_hidden_states
    assert exact is not None
    torch.testing.assert_close(ours, exact.float(), **near(exact, terms=50, depth=3))


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_gives_the_modules_bits(
    name: str, modules_only: pytest.MonkeyPatch, calls: list[int]
) -> None:
    model = small(name)
    expected = all_rows(model, [8, 1, 5, 7])
    assert not calls
    modules_only.undo()
    assert torch.equal(all_rows(model, [8, 1, 5, 7]), expected)
    assert calls


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("steps", [[LENGTH], [8, 8, 5], [13, 3, 5]])
def test_rows_verified_together_have_the_bits_of_rows_decoded_one_by_one(
    name: str, steps: list[int], calls: list[int]
) -> None:
    model = small(name)
    assert torch.equal(all_rows(model, steps), all_rows(model, [1] * LENGTH))
    assert calls == steps + [1] * LENGTH


def test_rows_shared_out_over_threads_have_the_bits_of_rows_decoded_one_by_one() -> None:
    model = packed(LlamaConfig(**SIZES | {"hidden_size": 2046}))
    assert torch.equal(all_rows(model, [LENGTH]), all_rows(model, [1] * LENGTH))


@pytest.mark.parametrize("kept", [(), (0,), (1,), (2, 0), (3,)])
def test_layers_that_are_not_kept_share_a_place_and_change_nothing(
    kept: tuple[int, ...], calls: list[int]
) -> None:
    model = small("llama")

    def run(layers: tuple[int, ...]) -> TargetOutput:
        served = Served(model)
        attention = served.cache.attention(served.tables, [Span(0, 0, LENGTH)])
        return model(tokens(0), attention.positions, attention, layers)  # type: ignore[no-any-return]

    every, some = run(AUX_LAYERS), run(kept)
    assert torch.equal(some.hidden, every.hidden)
    if kept:
        assert every.aux_hidden_states is not None
        assert some.aux_hidden_states is not None
        parts = every.aux_hidden_states.chunk(len(AUX_LAYERS), dim=-1)
        assert torch.equal(some.aux_hidden_states, torch.cat([parts[i] for i in kept], dim=-1))
    assert calls == [LENGTH] * 2


def test_a_sequence_has_the_same_bits_beside_others() -> None:
    model = small("llama")
    alone = all_rows(model, [9, 6, 6])
    together = Served(model, num_sequences=3)
    first = together.step([Span(1, 0, 5), Span(0, 0, 9), Span(2, 0, 12)])
    second = together.step([Span(0, 9, 6), Span(2, 12, 1)])
    third = together.step([Span(1, 5, 4), Span(0, 15, 6)])
    ours = torch.cat((first[5:14], second[:6], third[4:]))
    assert torch.equal(ours, alone)


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True}, {"attention_bias": True}])
def test_a_drafters_layers_agree_with_their_modules(
    changes: dict[str, Any], modules_only: pytest.MonkeyPatch, calls: list[int]
) -> None:
    target = UNEVEN.make_target(torch.float32)
    network = UNEVEN.make_head(target, num_hidden_layers=3, head_dim=8, **changes)
    pack_weights(network)
    config = network.config
    embeddings, features = torch.randn(2, LENGTH, config.hidden_size)
    layout = CacheLayout(3, config.num_key_value_heads, config.head_dim)

    def run() -> Tensor:
        cache = PagedKVCache(layout, 24, torch.float32, torch.device("cpu"))
        table = BlockTable(4, range(0))
        for block in (3, 1, 5, 0, 2, 4):
            table.append(block)
        attention = cache.attention([table], [Span(0, 0, LENGTH)])
        out: Tensor = network(embeddings, features, attention.positions, attention)
        return out

    expected = run()
    modules_only.undo()
    assert torch.equal(run(), expected)
    assert calls == [LENGTH]


@pytest.mark.parametrize(
    "x",
    [torch.ones(2, 8).double(), torch.ones(8), torch.ones(1, 2, 8)],
    ids=["float64", "vector", "batch"],
)
def test_what_does_not_fit_is_left_to_the_modules(x: Tensor) -> None:
    assert not kernel_takes(x)


def test_weights_in_the_usual_order_are_left_to_the_modules(calls: list[int]) -> None:
    model = small("llama")
    expected = all_rows(model, [LENGTH])
    projection = model.layers[1].self_attn.o_proj
    projection.weight = torch.nn.Parameter(unpacked(matrix_of(projection)), requires_grad=False)
    projection.packed = None
    ours = all_rows(copy.deepcopy(model), [LENGTH])
    torch.testing.assert_close(ours, expected, **near(expected, terms=50, depth=3))
    assert calls == [LENGTH]


def test_without_torchs_threads_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "run_on_threads", lambda: None)
    assert layers_function.__wrapped__() is None


def test_a_copy_follows_its_own_weights(calls: list[int]) -> None:
    model = small("llama")
    before = all_rows(model, [LENGTH])
    other = copy.deepcopy(model)
    for parameter in other.layers.parameters():
        parameter.mul_(0.5)
    assert not torch.equal(all_rows(other, [LENGTH]), before)
    assert torch.equal(all_rows(model, [LENGTH]), before)
    assert len(calls) == 3


def test_norms_of_another_dtype_are_left_to_the_modules(calls: list[int]) -> None:
    model = small("llama")
    expected = all_rows(model, [LENGTH])
    model.layers[1].post_attention_layernorm.double()
    with pytest.raises(RuntimeError, match=r"dtype|[Dd]ouble|[Ff]loat"):
        all_rows(model, [LENGTH])  # torch's own answer: the kernel would read garbage
    assert len(calls) == 1
    assert expected.isfinite().all()

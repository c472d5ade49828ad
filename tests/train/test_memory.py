"""Memory is counted from shapes: never less than a step takes, and not much more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peagle.data.packing import PackedRow
from peagle.errors import ConfigError
from peagle.models.eagle import EagleNetwork, SharedTables
from peagle.models.head_config import HeadConfig
from peagle.teacher_forcing import draft_model
from peagle.teacher_forcing.draft_model import DraftModel
from peagle.teacher_forcing.features import Features
from peagle.train.cod import retentions
from peagle.train.losses import ChunkedLoss, Rollouts, Tables, Truth
from peagle.train.memory import (
    feature_bytes,
    fixed_bytes,
    layer_bytes,
    loss_bytes,
    max_rows,
    row_bytes,
    state_bytes,
)
from peagle.train.optimizer import build_optimizer
from peagle.train.planner import Eagle3Planner, PEaglePlanner, PlannedRow
from peagle.train.recipe import OptimizerSection
from peagle.train.setup import checkpoint_activations
from peagle.train.trainer import Trainer
from tests.tiny import training
from tests.tiny.models import DEEP
from tests.train.live_memory import KernelAttention, LiveBytes

MOST = 1.6  # times what is really taken
NUM_TOKENS = 200


class RandomFeatures:
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype

    def fetch(self, row: PackedRow) -> None:
        return None

    def __call__(self, row: PackedRow, fetched: None) -> Features:
        n = len(row.token_ids)
        aux_hidden_states, states = torch.randn(n, 3 * self.size), torch.randn(n, self.size)
        return Features(
            row.token_ids.roll(-1), aux_hidden_states.to(self.dtype), states.to(self.dtype)
        )


def head(method: str, size: int, inner: int, layers: int, dtype: torch.dtype) -> EagleNetwork:
    config = DEEP.head_config(
        method,
        hidden_size=size,
        target_hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        head_dim=size // 4,
        max_position_embeddings=512,
    )
    tables = SharedTables(
        nn.Embedding(training.VOCAB, size, dtype=dtype),
        nn.Linear(size, training.VOCAB, bias=False, dtype=dtype),
    )
    for table in tables:
        table.requires_grad_(False)
    return EagleNetwork(config, tables)


def planned_row(config: HeadConfig) -> PlannedRow:
    kind = PEaglePlanner if config.method == "p-eagle" else Eagle3Planner
    planner = kind(retentions(4, 0.8, 0.0), torch.ones(4))
    row = training.packed([NUM_TOKENS - 40, 40], NUM_TOKENS)
    return planner(row, torch.Generator().manual_seed(0))


def peak_of_a_step(network: EagleNetwork, planned: PlannedRow, chunk_rows: int) -> int:
    """Bytes beyond weights and moments; autocast if the borrowed tables are in bf16."""
    table = network.shared.lm_head.weight
    model = DraftModel(network)
    trainer = Trainer(
        model,
        model,
        RandomFeatures(network.config.hidden_size, table.dtype),
        table,
        ChunkedLoss("kl", chunk_rows, compiled=False),
        build_optimizer(network, OptimizerSection()),
        max_grad_norm=1.0,
        dtype=torch.bfloat16 if table.dtype == torch.bfloat16 else None,
    )
    trainer.step([planned], 1e-3)  # makes the moments
    with LiveBytes() as live:
        trainer.step([planned], 1e-3)
    return live.peak


def counted(network: EagleNetwork, rows: int, chunk_rows: int, *, checkpointing: bool) -> int:
    """The same bytes from shapes."""
    config, itemsize = network.config, network.shared.lm_head.weight.itemsize
    state = state_bytes(network, itemsize)
    return (
        state["gradients"]
        + state["their copies in the compute dtype"]
        + feature_bytes(config, NUM_TOKENS, itemsize)
        + loss_bytes(config, chunk_rows, itemsize, compiled=False)
        + rows * row_bytes(config, itemsize, activation_checkpointing=checkpointing)
    )


@pytest.mark.slow
@given(
    method=st.sampled_from(["p-eagle", "p-eagle", "eagle3"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.sampled_from([32, 64, 96]),
    widening=st.sampled_from([1.0, 2.5, 4.0]),
    layers=st.integers(1, 4),
    checkpointing=st.booleans(),
    chunk_rows=st.sampled_from([64, 512]),
)
@settings(max_examples=15)
def test_the_count_is_a_bound_of_what_a_step_takes(
    method: str,
    dtype: torch.dtype,
    size: int,
    widening: float,
    layers: int,
    checkpointing: bool,
    chunk_rows: int,
) -> None:
    checkpointing = checkpointing and method == "p-eagle"
    network = head(method, size, int(size * widening), layers, dtype)
    if checkpointing:
        checkpoint_activations(network.layers, compiled=False)
    planned = planned_row(network.config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_model, "attention_for", lambda *_: KernelAttention())
        patch.setattr(draft_model, "context_for", lambda *_: KernelAttention())
        peak = peak_of_a_step(network, planned, chunk_rows)
    rows = len(planned.segments[0].positions)
    ratio = counted(network, rows, chunk_rows, checkpointing=checkpointing) / peak
    assert 1.0 <= ratio <= MOST


def kept_by_a_layer(network: EagleNetwork, num_rows: int, *, bf16: bool) -> int:
    """Bytes of the distinct storages that autograd keeps, parameters and rotations left out."""
    kept: dict[int, torch.UntypedStorage] = {}
    layer = network.layers[1]
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    dtype = torch.bfloat16 if bf16 else torch.float32
    x = torch.randn(num_rows, network.config.hidden_size, dtype=dtype, requires_grad=True)
    rotation = network.rotary(torch.arange(num_rows), dtype)
    known |= {part.untyped_storage().data_ptr() for part in rotation}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        layer(x, rotation, KernelAttention())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("size", "inner"), [(64, 160), (96, 96)])
def test_each_tensor_that_a_layer_keeps_is_counted(size: int, inner: int, bf16: bool) -> None:
    network = head("p-eagle", size, inner, 2, torch.float32)
    # The difference leaves out what does not grow with rows: the weights' copies in bf16.
    more, less = (kept_by_a_layer(network, rows, bf16=bf16) for rows in (200, 100))
    itemsize = 2 if bf16 else 4
    scales = 2 * 4  # one number for each norm
    assert (more - less) / 100 == layer_bytes(network.config, itemsize, compiled=False) + scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
def test_a_chunk_of_the_loss_is_counted(kind: Any, dtype: torch.dtype) -> None:
    """Logits alone: the vocabulary is large and the rest small."""
    vocab, size, rows, chunk_rows = 3000, 4, 60, 30
    tables = Tables(torch.randn(vocab, size).to(dtype), torch.randn(vocab, size).to(dtype))
    labels = torch.zeros(rows, dtype=torch.long)
    truth = Truth(torch.randn(rows, size).to(dtype), labels, labels)
    with LiveBytes() as live:
        loss = ChunkedLoss(kind, chunk_rows, compiled=False)
        alone = Rollouts(torch.arange(rows), labels, rows, 1)
        loss(torch.randn(rows, size).to(dtype), tables, truth, torch.ones(rows), alone)
    config = DEEP.head_config(vocab_size=vocab, draft_vocab_size=vocab)
    ratio = loss_bytes(config, chunk_rows, dtype.itemsize, compiled=False) / live.peak
    assert 0.98 <= ratio <= (1.1 if kind == "kl" else MOST)


# One H200, bf16 autocast, compiled; SmolLM2's head for all of its vocabulary, r = 0.8, K = 8.
@pytest.mark.parametrize(
    ("num_tokens", "rows", "measured_gib"), [(16384, 48128, 5.2), (32768, 93184, 8.8)]
)
def test_the_count_is_a_bound_of_peaks_measured_on_a_gpu(
    num_tokens: int, rows: int, measured_gib: float
) -> None:
    network = smollm2_head()
    target = 134_515_008 * 2
    fixed = target + fixed_bytes(network, num_tokens, 4096, 2, compiled=True)
    per_row = row_bytes(network.config, 2, activation_checkpointing=False, compiled=True)
    assert 1.0 <= (fixed + rows * per_row) / 2**30 / measured_gib <= MOST


def smollm2_head(**changes: Any) -> EagleNetwork:
    config = DEEP.head_config(
        hidden_size=576,
        target_hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        draft_vocab_size=49152,
        max_position_embeddings=8192,
        max_speculative_tokens=8,
        **changes,
    )
    with torch.device("meta"):
        tables = SharedTables(nn.Embedding(49152, 576), nn.Linear(576, 49152, bias=False))
        return EagleNetwork(config, tables)


def test_checkpointing_and_compilation_keep_less() -> None:
    config = smollm2_head().config
    eager = row_bytes(config, 2, activation_checkpointing=False)
    assert row_bytes(config, 2, activation_checkpointing=False, compiled=True) < eager
    assert row_bytes(config, 2, activation_checkpointing=True) < 0.5 * eager


def test_a_segment_fills_its_budget_and_no_more() -> None:
    rows = max_rows(budget=1000, fixed=90, per_row=7, least=100)
    assert 90 + rows * 7 <= 1000 < 90 + (rows + 1) * 7
    with pytest.raises(ConfigError, match="cannot hold the 131 rows that a segment needs"):
        max_rows(budget=1000, fixed=90, per_row=7, least=131)

"""What only a GPU can show: kernels agree with dense attention, and shapes compile once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.data.packing import PackedRow
from peagle.models.attention import Attention, MaskedAttention
from peagle.models.eagle import EagleNetwork
from peagle.models.masks import Elements, dense_mask
from peagle.teacher_forcing import draft_model
from peagle.teacher_forcing.attention import attention_for
from peagle.teacher_forcing.features import Features, OnlineFeatures
from peagle.teacher_forcing.partition import Shapes, build_segments, supervised_runs
from peagle.train.cod import draw_depths, retentions
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def dense(elements: Elements, positions: torch.Tensor, windows: object = None) -> Attention:
    return MaskedAttention(dense_mask(elements), positions)


def case() -> tuple[PackedRow, EagleNetwork, Features]:
    torch.set_float32_matmul_precision("highest")
    row = training.packed([200, 120, 250], 640)
    model = DEEP.make_target(torch.float32, head_dim=16).to(CUDA)
    network = training.trainable_head(DEEP.make_target(torch.float32, head_dim=16), head_dim=16).to(
        CUDA
    )
    network.shared = network.shared._replace(embed_tokens=model.embed_tokens, lm_head=model.lm_head)
    return row, network, OnlineFeatures(model, (2, 3, 5))(row)


def gradient(network: EagleNetwork, hidden: torch.Tensor) -> torch.Tensor:
    network.zero_grad()
    (hidden.float() ** 2).mean().backward()
    assert network.fc.weight.grad is not None
    return network.fc.weight.grad.clone()


def test_flex_attention_trains_like_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    row, network, features = case()
    counts = draw_depths(
        supervised_runs(row), retentions(4, 0.8, 0.0), torch.Generator().manual_seed(0)
    )
    (segment,) = build_segments(row, counts, [0, 640], torch.ones(4), Shapes(row_multiple=128))
    segment = segment.to(CUDA)
    assert not isinstance(attention_for(segment.elements, segment.positions), MaskedAttention)
    flex = draft_model.loss_states(network, segment, features)
    flex_gradient = gradient(network, flex)
    monkeypatch.setattr(draft_model, "attention_for", dense)
    expected = draft_model.loss_states(network, segment, features)
    torch.testing.assert_close(flex, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(flex_gradient, gradient(network, expected), atol=1e-3, rtol=1e-2)


def test_unrolling_with_flex_attention_trains_like_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    row, _, features = case()
    model = DEEP.make_target(torch.float32)
    network = training.trainable_head(model, "eagle3", head_dim=16)
    network.shared.embed_tokens.to(CUDA)
    network.to(CUDA)
    document, position = row.document.to(CUDA), row.position.to(CUDA)
    flex = torch.cat(draft_model.unroll(network, features, document, position, 4))
    flex_gradient = gradient(network, flex)

    def context(
        elements: Elements, positions: torch.Tensor, windows: object
    ) -> draft_model.ContextAttention:
        return draft_model.DenseContext(MaskedAttention(dense_mask(elements), positions))

    monkeypatch.setattr(draft_model, "context_for", context)
    expected = torch.cat(draft_model.unroll(network, features, document, position, 4))
    torch.testing.assert_close(flex, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(flex_gradient, gradient(network, expected), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_a_compiled_run_learns_in_bf16(method: str, tmp_path: Path) -> None:
    training.write_dataset(tmp_path / "data", training.counting_language(400, 40))
    recipe = training.recipe(
        tmp_path,
        head={"method": method},
        data={"tokens_per_row": 1024, "held_out_share": 0.05},
        loss={"kind": "ce", "chunk_rows": 512},
        schedule={"steps": 150},
        run={"device": "cuda"},
    )
    model = DEEP.make_target(torch.bfloat16, head_dim=16).to(CUDA)
    assert TrainingRun(assemble(recipe, model, ROPE))().best > 1.5

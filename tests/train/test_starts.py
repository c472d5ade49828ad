"""The weights that a head starts with: the target's last layers, or another head's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.checkpoints.heads.loading import load_head, save_head
from peagle.errors import ConfigError
from peagle.models.eagle import EagleNetwork, FirstLayer
from peagle.models.target import TargetModel
from peagle.teacher_forcing.draft_model import segment_hidden
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.teacher_forcing.partition import Segment
from peagle.train.planner import build_planner
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

AUX_LAYERS = [2, 3, 3]  # the last is the input of the target's last three layers


@pytest.fixture
def data(tmp_path: Path) -> Path:
    training.write_dataset(tmp_path / "data", training.counting_language(40, 24))
    return tmp_path


def network(folder: Path, target: TargetModel, **head: Any) -> EagleNetwork:
    return assemble(training.recipe(folder, head=head), target, ROPE).network


def copied(folder: Path, target: TargetModel) -> EagleNetwork:
    options = {"num_hidden_layers": 3, "aux_hidden_state_layer_ids": AUX_LAYERS}
    return network(folder, target, copy_target_layers=True, **options)


def test_the_layers_are_the_targets_last_ones(data: Path) -> None:
    target = DEEP.make_target()
    made = copied(data, target)
    first = made.layers[0]
    assert isinstance(first, FirstLayer)
    source = target.layers[3]
    assert torch.equal(first.self_attn.qkv_proj.weight[:, 16:], source.self_attn.qkv_proj.weight)
    assert torch.equal(first.hidden_norm.weight, source.input_layernorm.weight)
    assert torch.equal(first.mlp.down_proj.weight, source.mlp.down_proj.weight)
    for ours, its in zip(list(made.layers)[1:], target.layers[4:], strict=True):
        for name, weight in ours.state_dict().items():
            assert torch.equal(weight, its.state_dict()[name]), name
    assert torch.equal(made.norm.weight, target.norm.weight)
    with torch.no_grad():  # a copy: training must not change the target
        first.mlp.down_proj.weight.zero_()
    assert source.mlp.down_proj.weight.any()


def test_the_features_begin_as_the_last_tap(data: Path) -> None:
    aux_hidden_states = torch.randn(5, 48, dtype=torch.float64)
    assert torch.equal(
        copied(data, DEEP.make_target()).features(aux_hidden_states), aux_hidden_states[:, 32:]
    )


def test_without_the_embeddings_part_it_says_what_the_target_says(data: Path) -> None:
    """Fed with the stream that enters the copied layers, real rows leave as the target's do."""
    target = DEEP.make_target()
    made = copied(data, target)
    first = made.layers[0]
    assert isinstance(first, FirstLayer)
    row = training.packed([20, 12], 32)
    features = OnlineFeatures(target, tuple(AUX_LAYERS))(row)
    (segment,) = build_planner(training.recipe(data), made.config)(row, torch.Generator()).segments
    with torch.no_grad():
        noisy = real_rows(made, segment, features)
        first.self_attn.qkv_proj.weight[:, :16] = 0.0  # what it starts to learn from noise
        exact = real_rows(made, segment, features)
    torch.testing.assert_close(exact, features.states)
    assert not torch.allclose(noisy, features.states)


def real_rows(made: EagleNetwork, segment: Segment, features: Any) -> torch.Tensor:
    out: torch.Tensor = made.norm(segment_hidden(made, segment, features)[:32])
    return out


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"num_hidden_layers": 7}, "cannot fill 7 layers: the target has 6"),
        ({"intermediate_size": 64}, "needs the target's intermediate_size, 32, not 64"),
    ],
)
def test_layers_that_cannot_be_copied_are_refused(
    head: dict[str, Any], message: str, data: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        network(data, DEEP.make_target(), copy_target_layers=True, **head)


def test_a_run_starts_with_another_heads_weights(data: Path) -> None:
    target = DEEP.make_target(torch.float32)
    other = training.trainable_head(target, seed=5)
    save_head(other, data / "other")
    made = network(data, target, start_from=str(data / "other"))
    for name, weight in other.named_parameters():
        assert torch.equal(dict(made.named_parameters())[name], weight), name
    assert all(p.requires_grad for p in made.parameters())


def test_the_head_that_is_saved_has_this_runs_depth_and_name(data: Path) -> None:
    """What a run may change of the head that it starts from."""
    target = DEEP.make_target(torch.float32)
    save_head(training.trainable_head(target), data / "other")
    options = {"max_speculative_tokens": 6, "num_speculative_tokens": 5}
    made = network(data, target, start_from=str(data / "other"), **options)
    save_head(made, data / "again")
    again = load_head(str(data / "again"), target, dtype=torch.float32, device=torch.device("cpu"))
    assert (again.config.max_speculative_tokens, again.config.num_speculative_tokens) == (6, 5)
    assert again.config.target_model == "smollm2-135m"


def test_a_start_of_other_sizes_names_them(data: Path) -> None:
    target = DEEP.make_target(torch.float32)
    save_head(training.trainable_head(target, num_hidden_layers=3), data / "other")
    with pytest.raises(ConfigError, match="num_hidden_layers 3, not 2"):
        network(data, target, start_from=str(data / "other"))

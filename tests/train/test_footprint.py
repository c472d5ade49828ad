"""A run's memory by what it is for, computed on any machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import ConfigError
from peagle.train.forecast import disk_use, forecast, run_length
from peagle.train.inputs import open_inputs
from peagle.train.memory import Footprint, footprint
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    training.write_dataset(tmp_path / "data", training.counting_language(40, 24))
    return tmp_path


def computed(folder: Path, num_gpus: int = 1, device: Any = "cuda", **sections: Any) -> Footprint:
    recipe = training.recipe(folder, **sections)
    return footprint(open_inputs(recipe, DEEP.make_target().config, ROPE), num_gpus, device)


def test_every_part_of_a_plain_run_is_listed(data: Path) -> None:
    network = training.trainable_head(DEEP.make_target(torch.float32))
    weights = sum(p.numel() for p in network.parameters())
    parts = computed(data).parts
    assert parts["target's weights"] == 2 * sum(p.numel() for p in DEEP.make_target().parameters())
    assert parts["gradients"] == 4 * weights
    assert parts["AdamW's moments"] == 8 * weights
    assert parts["drafter's weights"] > 4 * weights  # and the rotations' tables
    assert 1.9 * weights < parts["their copies in the compute dtype"] <= 2 * weights
    assert {name.split(" of ")[0] for name in parts} > {"features", "activations", "loss"}


def test_what_a_recipe_changes_shows(data: Path) -> None:
    def activations(**run: Any) -> int:
        parts = computed(data, device="cpu", run=run).parts
        return next(size for name, size in parts.items() if name.startswith("activations"))

    assert activations(activation_checkpointing=True) < activations()
    assert activations(partitions=3) < activations()
    assert "dense attention masks" in computed(data, device="cpu").parts
    assert "dense attention masks" not in computed(data).parts
    own_tables = computed(data, head={"train_embed_tokens": True, "train_lm_head": True})
    assert own_tables.total > computed(data).total


def test_features_from_disk_leave_the_targets_layers_out(data: Path) -> None:
    weight = "target's weights"
    stored = computed(data, data={"features": "somewhere"}).parts[weight]
    tables = (
        DEEP.make_target().embed_tokens.weight.numel() + DEEP.make_target().lm_head.weight.numel()
    )
    assert stored == 2 * (tables + 16)  # and the final norm
    copied = computed(data, data={"features": "x"}, head={"copy_target_layers": True})
    assert copied.parts[weight] == computed(data).parts[weight]  # layers to copy from


def test_fsdp2_shares_weights_and_moments_and_ddp_does_not(data: Path) -> None:
    one = computed(data).parts
    sharded = computed(data, 8, run={"sharding": "fsdp2"}).parts
    copied = computed(data, 8, run={"sharding": "ddp"}).parts
    moments = "AdamW's moments"
    assert sharded[moments] == one[moments] // 8
    assert copied[moments] == one[moments]
    assert copied["gradients"] == 2 * one["gradients"]
    # Gradients of several passes are summed whole before they are exchanged.
    several = computed(data, 8, run={"sharding": "fsdp2", "partitions": 2}).parts
    assert several["gradients"] == one["gradients"]


def test_the_forecast_names_minutes_steps_and_disk(data: Path) -> None:
    setup = assemble(training.recipe(data), DEEP.make_target(torch.float32), ROPE)
    found = forecast(setup, total_steps=600, num_steps=2)
    assert found["forecast_minutes"] == pytest.approx(found["seconds_per_step"] * 10)
    assert found["forecast_steps"] == 600
    assert found["tokens_per_second"] > 0
    assert found["peak_memory_gib"] > 0
    weights = 4 * sum(p.numel() for p in setup.network.parameters())
    # Two checkpoints stay while a third is written, each with two moments, and a head likewise.
    assert disk_use(setup)["disk_gib"] * 2**30 == (3 * 3 + 2) * weights
    assert not (data / "run").exists()


def test_a_schedule_by_time_forecasts_its_steps(data: Path) -> None:
    recipe = training.recipe(data, schedule={"steps": None, "minutes": 2.0})
    length = run_length(recipe, 0, seconds_per_step=0.5)
    assert length == {"forecast_steps": 240, "forecast_minutes": 2.0}


def test_auto_partitions_follow_the_budget(data: Path) -> None:
    whole = computed(data, device="cpu")
    without_masks = whole.total - whole.parts["dense attention masks"]
    budget = (without_masks - 0.4 * _activations(whole)) / 2**30
    options = {"partitions": "auto", "memory_gib": budget}
    parted = computed(data, device="cpu", run=options)
    assert parted.passes_per_step > 1
    assert parted.rows_per_pass < whole.rows_per_pass
    with pytest.raises(ConfigError, match="rows that a segment needs"):
        computed(data, device="cpu", run=options | {"memory_gib": 1e-6})


def test_auto_partitions_without_a_budget_are_counted_as_one(data: Path) -> None:
    """What a GPU has free is not known here."""
    whole = computed(data, device="cuda")
    assert computed(data, device="cuda", run={"partitions": "auto"}) == whole


def _activations(one: Footprint) -> int:
    return next(size for name, size in one.parts.items() if name.startswith("activations"))


@pytest.mark.parametrize(
    "options", [{"partitions": 2}, {"partitions": "auto"}, {"activation_checkpointing": True}]
)
def test_what_eagle3_cannot_do_is_refused(options: dict[str, Any], data: Path) -> None:
    recipe = training.recipe(data, head={"method": "eagle3"}, run=options)
    with pytest.raises(ConfigError, match="works with p-eagle heads only"):
        assemble(recipe, DEEP.make_target(torch.float32), ROPE)


def test_a_footprint_is_the_sum_of_its_parts() -> None:
    one = Footprint({"a": 1, "b": 2}, rows_per_pass=1, passes_per_step=1, num_gpus=1)
    assert one.total == 3
    assert dataclasses.replace(one, parts={}).total == 0

"""A head learns a small language in seconds, by either method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peagle.checkpoints.heads.loading import load_head
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_loss_falls_and_acceptance_rises_above_one_and_a_half(method: str, tmp_path: Path) -> None:
    training.write_dataset(tmp_path / "data", training.counting_language(120, 40))
    recipe = training.recipe(
        tmp_path,
        head={"method": method},
        data={"tokens_per_row": 200, "held_out_share": 0.05},
        optimizer={"learning_rate": 2e-2},
        loss={"kind": "ce"},
        schedule={"steps": 150},
    )
    model = DEEP.make_target(torch.float32)
    progress = TrainingRun(assemble(recipe, model, ROPE))()
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < 0.6 * losses[0]
    assert progress.best > 1.5
    head = load_head(
        str(tmp_path / "run" / "head"), model, dtype=torch.float32, device=torch.device("cpu")
    )
    assert head.config.method == method

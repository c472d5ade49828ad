"""States from disk train like states from the target, and never for other tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.data.dataset import Dataset
from peagle.data.packing import pack
from peagle.errors import DataError
from peagle.teacher_forcing.features import OnlineFeatures
from peagle.train.features.capture import StoredFeatures, capture, states_bytes
from peagle.train.loop import TrainingRun
from peagle.train.setup import assemble
from tests.tiny import training
from tests.tiny.models import DEEP, ROPE

AUX_LAYERS = (2, 3, 5)


def captured(folder: Path, **options: int) -> tuple[Dataset, OnlineFeatures]:
    training.write_dataset(folder / "data", training.counting_language(20, 24))
    dataset = Dataset(folder / "data")
    online = OnlineFeatures(DEEP.make_target(torch.float32), AUX_LAYERS)
    list(capture(dataset, online, folder / "states", "tiny", tokens_per_pass=100, **options))
    return dataset, online


def stored(folder: Path, dataset: Dataset) -> StoredFeatures:
    return StoredFeatures(folder / "states", "tiny", AUX_LAYERS, dataset, torch.zeros(1))


def test_stored_states_are_the_targets_own(tmp_path: Path) -> None:
    dataset, online = captured(tmp_path)
    row = pack(dataset, [3, 17, 8], 80)
    source = stored(tmp_path, dataset)
    ours, theirs = source(row, source.fetch(row)), online(row)
    assert torch.equal(ours.next_tokens, theirs.next_tokens)
    used = 72
    torch.testing.assert_close(
        ours.aux_hidden_states[:used].float(), theirs.aux_hidden_states[:used], rtol=1e-2, atol=1e-2
    )
    torch.testing.assert_close(
        ours.states[:used].float(), theirs.states[:used], rtol=1e-2, atol=1e-2
    )


@pytest.mark.slow
def test_training_does_not_know_where_its_features_come_from(tmp_path: Path) -> None:
    captured(tmp_path)
    losses = []
    for features in (None, str(tmp_path / "states")):
        recipe = training.recipe(
            tmp_path,
            target={"model": "tiny"},
            data={"features": features},
            loss={"weighting": "acceptance"},
            run={"folder": str(tmp_path / f"run-{features is None}")},
        )
        setup = assemble(recipe, DEEP.make_target(torch.float32), ROPE)
        TrainingRun(setup)()
        rows = setup.batches.rows_from(0)
        setup.trainer.step([next(rows)], 0.0)
        losses.append(setup.trainer.take_metrics().loss)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_killed_capture_goes_on_where_it_was(tmp_path: Path) -> None:
    training.write_dataset(tmp_path / "data", training.counting_language(20, 24))
    dataset = Dataset(tmp_path / "data")
    online = OnlineFeatures(DEEP.make_target(torch.float32), AUX_LAYERS)
    first = capture(dataset, online, tmp_path / "states", "tiny", tokens_per_pass=100)
    assert next(first) == 4
    first.close()
    second = list(capture(dataset, online, tmp_path / "states", "tiny", tokens_per_pass=100))
    assert second == [8, 12, 16, 20]
    source = stored(tmp_path, dataset)
    assert all(len(source._read(i)[0]) == 24 for i in range(20))


def test_states_of_other_tokens_are_refused(tmp_path: Path) -> None:
    captured(tmp_path)
    training.write_dataset(tmp_path / "other", training.counting_language(20, 24, seed=1))
    dataset = Dataset(tmp_path / "other")
    with pytest.raises(DataError, match="belong to other tokens"):
        stored(tmp_path, dataset).fetch(pack(dataset, [0], 24))


def test_states_of_other_layers_or_targets_are_refused(tmp_path: Path) -> None:
    dataset, _ = captured(tmp_path)
    for target, aux_hidden_states in (("tiny", (1, 3, 5)), ("another", AUX_LAYERS)):
        with pytest.raises(DataError, match="but the head reads"):
            StoredFeatures(tmp_path / "states", target, aux_hidden_states, dataset, torch.zeros(1))


def test_the_forecast_is_the_size_on_disk_and_a_limit_stops_before_it(tmp_path: Path) -> None:
    captured(tmp_path)
    on_disk = sum(f.stat().st_size for f in (tmp_path / "states").glob("*.safetensors"))
    assert states_bytes(20 * 24, 16, 3) == pytest.approx(on_disk, rel=0.03)
    with pytest.raises(DataError, match="more than"):
        captured(tmp_path / "b", max_disk=1000)
    assert not list((tmp_path / "b" / "states").glob("*.safetensors"))

"""The prepared dataset survives kills and refuses what cannot be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peagle.data.dataset import Dataset, DatasetWriter, Row
from peagle.errors import DataError

MADE_BY = {"target": "tiny", "temperature": 0.0}


def row(number: int, length: int = 5) -> Row:
    mask = [0] * 2 + [1] * (length - 2)
    return Row(f"row-{number}", list(range(number, number + length)), mask, category="chat")


def write(folder: Path, numbers: range, rows_per_shard: int = 3) -> None:
    writer = DatasetWriter(folder, MADE_BY, rows_per_shard=rows_per_shard)
    for number in numbers:
        writer.add(row(number, 5 + number % 3))
    writer.flush()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    write(tmp_path, range(8))
    dataset = Dataset(tmp_path)
    assert len(dataset) == 8
    for number in range(8):
        expected = row(number, 5 + number % 3)
        assert list(dataset[number].token_ids) == expected.token_ids
        assert list(dataset[number].loss_mask) == expected.loss_mask
        assert (dataset[number].id, dataset[number].category) == (expected.id, "chat")
    assert dataset.manifest["totals"] == {"rows": 8, "tokens": 47, "supervised_tokens": 31}


def test_further_folders_follow_and_a_prompt_keeps_its_side(tmp_path: Path) -> None:
    write(tmp_path / "greedy", range(40))
    write(tmp_path / "sampled", range(40))
    both = Dataset(tmp_path / "greedy", more=[tmp_path / "sampled"])
    assert [r["id"] for r in both.info] == [f"row-{n}" for n in range(40)] * 2
    assert list(both[47].token_ids) == row(7, 5 + 7 % 3).token_ids
    train, held_out = both.split(0.3)
    assert 0 < len(held_out) < 80
    assert not {both.info[i]["id"] for i in train} & {both.info[i]["id"] for i in held_out}


def test_an_empty_further_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "full", range(3))
    DatasetWriter(tmp_path / "empty", MADE_BY)
    with pytest.raises(DataError, match="empty"):
        Dataset(tmp_path / "full", more=[tmp_path / "empty"])


def test_a_second_writer_continues_and_knows_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, range(4))
    writer = DatasetWriter(tmp_path, MADE_BY)
    assert writer.row_ids() == {f"row-{i}" for i in range(4)}
    writer.add(row(9))
    writer.flush()
    assert [r["id"] for r in Dataset(tmp_path).info][-2:] == ["row-3", "row-9"]


def test_a_shard_that_the_manifest_does_not_name_does_not_exist(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    manifest = (tmp_path / "manifest.json").read_text()
    write(tmp_path, range(3, 6))
    (tmp_path / "manifest.json").write_text(manifest)  # killed before the manifest was replaced
    assert len(Dataset(tmp_path)) == 3
    write(tmp_path, range(3, 6))
    assert len(Dataset(tmp_path)) == 6


def test_rows_made_with_other_options_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    with pytest.raises(DataError, match="other options"):
        DatasetWriter(tmp_path, {"target": "another"})


def test_a_rows_side_of_the_split_depends_on_its_id_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", range(40))
    write(tmp_path / "b", range(39, -1, -1))
    held = []
    for name in "ab":
        dataset = Dataset(tmp_path / name)
        train, held_out = dataset.split(0.25)
        assert sorted(train + held_out) == list(range(40))
        held.append({dataset.info[i]["id"] for i in held_out})
    assert held[0] == held[1]
    assert 3 <= len(held[0]) <= 20


def test_all_rows_of_a_conversation_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, MADE_BY)
    for number in range(40):
        for suffix in ("", "#2", "#3"):
            writer.add(Row(f"p{number}{suffix}", [1, 2], [0, 1]))
        writer.add(Row(f"given#{number}", [1, 2], [0, 1]))  # ids of prompts that share a prefix
    writer.flush()
    dataset = Dataset(tmp_path)
    sides = [{dataset.info[i]["id"] for i in side} for side in dataset.split(0.5)]
    for ids in sides:
        conversations = {name.partition("#")[0] for name in ids if name.startswith("p")}
        assert 10 < len(conversations) < 30
        own = {f"{name}{suffix}" for name in conversations for suffix in ("", "#2", "#3")}
        assert own <= ids
        assert 10 < len(ids - own) < 30


def test_a_longer_row_is_cut_and_counted(tmp_path: Path) -> None:
    write(tmp_path, range(6))
    dataset = Dataset(tmp_path, max_length=6)
    assert dataset.num_cut == 2
    assert [len(dataset[i].token_ids) for i in range(6)] == [5, 6, 6, 5, 6, 6]
    assert dataset.lengths.tolist() == [5, 6, 6, 5, 6, 6]


def test_tokens_and_mask_of_different_lengths_are_refused(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, MADE_BY)
    with pytest.raises(DataError, match="3 tokens but 2 mask values"):
        writer.add(Row("x", [1, 2, 3], [0, 1]))
    with pytest.raises(DataError, match="empty"):
        writer.add(Row("x", [], []))


def test_a_dataset_without_rows_or_supervised_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared dataset"):
        Dataset(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": "peagle-dataset-1", "made_by": {}, "shards": []})
    )
    with pytest.raises(DataError, match="holds no rows"):
        Dataset(tmp_path)
    writer = DatasetWriter(tmp_path / "b", MADE_BY)
    writer.add(Row("x", [1, 2, 3], [0, 0, 0]))
    writer.flush()
    with pytest.raises(DataError, match="nothing to learn"):
        Dataset(tmp_path / "b")


def test_a_damaged_or_foreign_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    shard = tmp_path / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="shard-00000"):
        Dataset(tmp_path)
    write(tmp_path / "other", range(2))
    shard.write_bytes((tmp_path / "other" / "shard-00000.safetensors").read_bytes())
    with pytest.raises(DataError, match="manifest says 3 rows"):
        Dataset(tmp_path)
    assert torch.is_tensor(Dataset(tmp_path / "other")[0].token_ids)


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors"])
def test_a_file_that_cannot_be_read_is_not_said_to_be_missing(tmp_path: Path, name: str) -> None:
    write(tmp_path, range(2))
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=f"{name} cannot be read: Is a directory"):
        Dataset(tmp_path)

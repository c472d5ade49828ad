"""Broken JSON and weights are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peagle.cache import cache_folder
from peagle.checkpoints.files import (
    iter_tensors,
    read_json,
    tensor_names,
)
from peagle.errors import ModelError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize("content", ["", "{", '{"a": 1', "[1]", b"\xff\xfe"])
def test_broken_json_names_its_file(tmp_path: Path, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


def test_missing_json_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_json(tmp_path / "config.json")


def _write_shards(folder: Path) -> None:
    save_file({"a": TENSORS["a"]}, folder / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_come_back_as_they_were_saved(tmp_path: Path, sharded: bool) -> None:
    _write_shards(tmp_path) if sharded else save_file(TENSORS, tmp_path / "model.safetensors")
    assert sorted(tensor_names(tmp_path)) == ["a", "b"]
    read = dict(iter_tensors(tmp_path))
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors"):
        list(iter_tensors(tmp_path))


def test_a_tensor_that_its_shard_does_not_hold_is_named(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"model-2\.safetensors lacks b"):
        tensor_names(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": "../a.safetensors"}, {"a": 1}])
def test_a_broken_index_is_named(tmp_path: Path, weight_map: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        tensor_names(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_weights_are_named(tmp_path: Path, kept: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        list(iter_tensors(tmp_path))


def test_pickled_weights_are_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin") as caught:
        tensor_names(tmp_path)
    assert "convert it to safetensors" in str(caught.value.hint)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        list(iter_tensors(tmp_path))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", "/p")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/p")
    monkeypatch.setenv("PEAGLE_CACHE", "")
    assert cache_folder() == Path("/x/peagle")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/h/.cache/peagle")
    monkeypatch.setenv("PEAGLE_CACHE", "~/mine")
    assert cache_folder() == Path("/h/mine")

"""Files are whole or not there, and broken weights are named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from peagle.cache import cache_folder
from peagle.checkpoints.files import (
    atomic_folder,
    iter_tensors,
    read_json,
    tensor_names,
    write_atomic,
)
from peagle.errors import ModelError

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def _age(path: Path) -> None:
    os.utime(path, (0, 0))


def test_write_atomic_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"old")
    write_atomic(tmp_path / "f", "neu: ü")
    assert (tmp_path / "f").read_text(encoding="utf-8") == "neu: ü"
    assert _names(tmp_path) == {"f"}


def test_a_reader_in_the_middle_of_the_old_content_keeps_it(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", "old")
    with (tmp_path / "f").open() as reader:
        write_atomic(tmp_path / "f", "new")
        assert reader.read() == "old"


def test_a_failed_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "f", "old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old"
    assert _names(tmp_path) == {"f"}


def test_atomic_folder_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "deep" / "folder") as unfinished:
        (unfinished / "sub").mkdir()
        (unfinished / "sub" / "file").write_text("x")
        assert not (tmp_path / "deep" / "folder").exists()
    assert (tmp_path / "deep" / "folder" / "sub" / "file").read_text() == "x"
    assert _names(tmp_path / "deep") == {"folder"}


def test_atomic_folder_replaces_an_older_folder_whole(tmp_path: Path) -> None:
    for content in ("one", "two"):
        with atomic_folder(tmp_path / "folder") as unfinished:
            (unfinished / content).write_text(content)
    assert _names(tmp_path / "folder") == {"two"}
    assert _names(tmp_path) == {"folder"}


def test_an_error_in_the_block_keeps_the_older_folder(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "folder") as unfinished:
        (unfinished / "old").write_text("old")

    def fail_halfway() -> None:
        with atomic_folder(tmp_path / "folder") as unfinished:
            (unfinished / "new").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert _names(tmp_path / "folder") == {"old"}
    assert _names(tmp_path) == {"folder"}


KILLED = """
import os, sys
from pathlib import Path
from peagle.checkpoints.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as unfinished:
    (unfinished / "half").write_text("half")
    os.kill(os.getpid(), 9)
"""


def test_a_killed_writer_leaves_no_folder_and_its_leftover_goes_with_the_next_write(
    tmp_path: Path,
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "folder")], check=False)
    assert done.returncode == -9
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".folder.")
    _age(leftover)
    with atomic_folder(tmp_path / "folder"):
        pass
    assert _names(tmp_path) == {"folder"}


def test_the_temporary_folder_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "folder") as slow:
        (slow / "slow").write_text("")
        _age(slow)
        with atomic_folder(tmp_path / "folder") as quick:
            (quick / "quick").write_text("")
        assert slow.is_dir()
    assert _names(tmp_path / "folder") == {"slow"}


def test_a_young_unlocked_leftover_may_be_in_use_and_stays(tmp_path: Path) -> None:
    (tmp_path / ".f.0123.tmp").write_text("half")
    write_atomic(tmp_path / "f", "whole")
    assert _names(tmp_path) == {"f", ".f.0123.tmp"}
    _age(tmp_path / ".f.0123.tmp")
    write_atomic(tmp_path / "f", "whole")
    assert _names(tmp_path) == {"f"}


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

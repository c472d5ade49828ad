"""`peagle capture`: a forecast first, then states that training accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.cli.capture import parse_size
from peagle.data.dataset import Dataset
from peagle.data.packing import pack
from peagle.errors import ConfigError
from peagle.files import held_folder
from peagle.train.features import capture as capture_module
from peagle.train.features.capture import StoredFeatures

from .fakes import Shell


def test_states_are_stored_and_a_second_run_adds_none(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    arguments = ("capture", data, "--model", model, "--out", str(tmp_path), "--device", "cpu")
    assert command(*arguments, "--json") == 0
    assert "8 rows" in command.err
    assert "KiB" in command.err.splitlines()[0]
    found = command.json
    assert found["aux_hidden_state_layers"] == [2, 3, 3]
    on_disk = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert found["bytes"] == pytest.approx(on_disk, rel=0.05)
    dataset = Dataset(Path(data))
    stored = StoredFeatures(tmp_path, model, (2, 3, 3), dataset, torch.zeros(1))
    assert (
        stored.fetch(pack(dataset, [0], int(dataset.lengths[0]))).aux_hidden_states.shape[1] == 96
    )
    files = sorted(tmp_path.iterdir())
    assert command(*arguments) == 0
    assert sorted(tmp_path.iterdir()) == files


def test_a_forecast_alone_writes_nothing(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    out = tmp_path / "states"
    assert command("capture", data, "--model", model, "--out", str(out), "--forecast") == 0
    assert command.out.startswith("8 rows, ")
    assert not out.exists()


def test_limits_and_mistakes_are_one_line(
    command: Shell, model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, message in (
        (("--max-disk", "1K"), "more than the 1.0 KiB allowed"),
        (("--max-disk", "much"), "is not a size"),
        (("--max-disk", "9" * 400 + "T"), "is not a size"),
        (("--max-length", "0"), "--max-length 0 is out of range"),
        (("--layer-ids", "2,99"), "are not all the target's"),
        (("--layer-ids", "x"), "is not a list"),
    ):
        assert command("capture", data, "--model", model, "--out", str(tmp_path), *changes) == 2
        assert message in command.err
        assert "hint: " in command.err

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(capture_module, "write_atomic", full)
    assert command("capture", data, "--model", model, "--out", str(tmp_path)) == 2
    assert "No space left on device" in command.err


def test_a_wrong_folder_and_a_wrong_device_are_found_before_the_model_is(
    command: Shell, data: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for changes, message in (
        (("--out", str(tmp_path / "file")), "Not a directory"),
        (("--out", str(tmp_path / "o"), "--device", "abacus"), "--device 'abacus' is unknown"),
    ):
        assert command("capture", data, "--model", "/missing", *changes) == 2
        assert message in command.err
    assert not (tmp_path / "o").exists()


def test_a_folder_that_another_process_writes_to_is_refused(
    command: Shell, model: str, data: str, tmp_path: Path
) -> None:
    with held_folder(tmp_path):
        assert command("capture", data, "--model", model, "--out", str(tmp_path)) == 2
    assert "another process is writing to" in command.err


def test_sizes_are_read_as_people_write_them() -> None:
    assert [parse_size(s) for s in ("10", "2k", "1.5G", "3 TiB")] == [
        10,
        2048,
        3 * 2**29,
        3 * 2**40,
    ]
    with pytest.raises(ConfigError):
        parse_size("G")

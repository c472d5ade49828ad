"""Files and folders are whole or not there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from peagle.errors import OutputError
from peagle.files import (
    atomic_file,
    atomic_folder,
    held_folder,
    remove_all_leftovers,
    write_atomic,
    write_json,
    writing,
)


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
from peagle.files import atomic_folder
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


def test_a_record_that_is_no_json_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_json(path, {"a": "ü"})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü"}
    assert _names(path.parent) == {"result.json"}
    assert path.stat().st_mode & 0o444 == 0o444  # a result is there to be read


def test_an_atomic_file_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "f") as unfinished:
        unfinished.write_text("x")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f").read_text() == "x"
    assert _names(tmp_path) == {"f"}


def special(folder: Path, name: str) -> Path:
    """What exists and is no regular file, as a device is; no test may aim at a real one."""
    path = folder / name
    if name == "pipe":
        os.mkfifo(path)
    elif name == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
            server.bind(name)  # the path of a socket must be short
    else:
        os.mkfifo(folder / "target")
        path.symlink_to("target")
    return path


@pytest.mark.parametrize("name", ["pipe", "socket", "link"])
def test_what_is_not_a_regular_file_is_never_replaced(tmp_path: Path, name: str) -> None:
    path = special(tmp_path, name)
    before = path.lstat(), _names(tmp_path)
    for write in (write_atomic, lambda path, _: write_json(path, {})):
        with pytest.raises(OutputError, match="not a regular file") as caught:
            write(path, "x")
        assert caught.value.hint
    with pytest.raises(OSError, match="Not a directory"), atomic_folder(path):
        pass
    refused = pytest.raises(OutputError, match="cannot write to")
    with refused, held_folder(path):
        pass
    assert (path.lstat(), _names(tmp_path)) == before


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="it is a folder"):
        write_atomic(tmp_path, "x")
    assert _names(tmp_path) == set()


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    link = tmp_path / "link"
    link.symlink_to("deep/f")
    for content in ("made", "replaced"):
        write_atomic(link, content)
        assert (tmp_path / "deep" / "f").read_text() == content
    assert link.is_symlink()
    assert _names(tmp_path / "deep") == {"f"}


def test_all_leftovers_go_but_what_a_living_writer_holds(tmp_path: Path) -> None:
    (tmp_path / ".a.01.tmp").mkdir()
    (tmp_path / ".b.02.tmp").write_text("half")
    (tmp_path / ".hidden").write_text("not ours")
    with atomic_file(tmp_path / "c") as unfinished:
        remove_all_leftovers(tmp_path)
        assert _names(tmp_path) == {unfinished.name, ".hidden"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_are_for_whoever_the_umask_allows(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "f", "x")
        with atomic_folder(tmp_path / "folder") as unfinished:
            (unfinished / "private").touch(0o600)  # as safetensors makes its files
    finally:
        os.umask(before)
    for path in (tmp_path / "f", tmp_path / "folder" / "private"):
        assert path.stat().st_mode & 0o777 == mode


def test_a_second_writer_of_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    refused = pytest.raises(OutputError, match="another process is writing to")
    with held_folder(tmp_path / "out"), refused, held_folder(tmp_path / "out"):
        pass
    with held_folder(tmp_path / "out"):  # it is free again
        pass


def test_a_file_system_without_locks_is_written_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with held_folder(tmp_path / "out"):
        write_atomic(tmp_path / "out" / "f", "x")
    assert (tmp_path / "out" / "f").read_text() == "x"


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left", "make room, then"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied", "permissions"),
        (FileExistsError(errno.EEXIST, "File exists"), "File exists", "check the path, then"),
        (
            SafetensorError("Error while serializing: I/O error: gone (os error 28) at path /x"),
            "No space left on device",
            "make room, then",
        ),
    ],
)
def test_what_the_disk_refuses_has_the_remedy_of_its_reason(
    error: Exception, reason: str, remedy: str
) -> None:
    with pytest.raises(OutputError) as caught, writing(Path("out"), then="go on"):
        raise error
    assert reason in caught.value.message
    assert remedy in str(caught.value.hint)


def test_an_error_that_is_not_the_disks_passes(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError

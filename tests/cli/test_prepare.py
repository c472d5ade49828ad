"""`peagle prepare`: the summary, resumption, endpoints, and errors of one line."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.data.dataset import Dataset, read_manifest
from peagle.files import held_folder
from peagle.prepare.answers import EmbeddedAnswers
from peagle.processes import raise_interruption
from tests.prepare.endpoint_server import completion, serving

from .conftest import PREPARE
from .fakes import Shell


def test_summary_is_json_and_progress_goes_to_stderr(
    command: Shell, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.cli.progress.FIRST_LINE_SECONDS", 0.0)
    arguments = (*PREPARE, "--model", model, "--prompts", prompts, "--out", str(tmp_path / "d"))
    assert command(*arguments, "--json") == 0
    found = command.json
    assert len(command.out.splitlines()) == 1
    assert "8 of 8 prompts" in command.err
    assert "tokens/s" in command.err
    assert (found["rows"], found["failed"], found["already_done"]) == (8, 0, 0)
    assert found["supervised_tokens"] <= 8 * 24
    assert found["answer_tokens"]["max"] <= 24
    assert 0 <= found["loop_share"] <= 1
    assert 0 < found["clipped_share"] <= 1

    # A second run has nothing left to do; more prompts are added to the same folder.
    assert command(*arguments, "--json") == 0
    assert (command.json["rows"], command.json["already_done"]) == (8, 8)
    more = tmp_path / "more.jsonl"
    more.write_text(Path(prompts).read_text() + '{"prompt": "one more"}\n{"prompt": 5}\n')
    assert command(*arguments, "--prompts", str(more), "--limit", "20") == 0
    assert "rows               9" in command.out
    errors = (tmp_path / "d" / "errors.jsonl").read_text()
    assert json.loads(errors)["row"] == "more.jsonl:10"


def test_a_drafter_speeds_up_and_changes_nothing(
    command: Shell, model: str, prompts: str, head: str, data: str, tmp_path: Path
) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--out", str(tmp_path))
    assert command(*PREPARE, *arguments, "--spec-model", head) == 0
    ours, expected = Dataset(tmp_path), Dataset(Path(data))
    rows = [
        {r.id: r.token_ids.tolist() for r in map(d.__getitem__, range(8))} for d in (ours, expected)
    ]
    assert rows[0] == rows[1]


def test_an_endpoint_answers_instead(
    command: Shell, model: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    with serving(lambda body: completion([65, 66, 0])) as (url, requests):
        code = command(
            *(*PREPARE, "--model", model, "--prompts", prompts, "--out", str(tmp_path)),
            *("--endpoint", url, "--endpoint-model", "served", "--concurrency", "3", "--json"),
            *("--endpoint-key-env", "SERVER_KEY"),
        )
    assert code == 0
    assert command.json["supervised_tokens"] == 8 * 3
    assert {(r["model"], r["key"]) for r in requests} == {("served", "Bearer secret")}
    assert read_manifest(tmp_path)["made_by"]["answers_from"] == "endpoint served"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--prompts": "/missing.jsonl"}, "no prompts at /missing.jsonl"),
        ({"--model": "/missing"}, "there is no folder /missing"),
        ({"--endpoint": "localhost"}, "is not an address"),
        ({"--temperature": "-1"}, "--temperature -1.0 is out of range"),
        ({"--max-prompt-tokens": "2"}, "no prompt was answered"),
        ({"--limit": "0"}, "--limit 0 is out of range"),
        ({"--cut-loops": "-5"}, "--cut-loops -5 is out of range"),
        ({"--concurrency": "0"}, "--concurrency 0 is out of range"),
    ],
)
def test_a_users_error_is_one_line(
    changes: dict[str, str], message: str, command: Shell, model: str, prompts: str, tmp_path: Path
) -> None:
    options = {"--model": model, "--prompts": prompts, "--out": str(tmp_path)} | changes
    assert command(*PREPARE, *(word for pair in options.items() for word in pair)) == 2
    assert message in command.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--endpoint": "http://127.0.0.1:9"}, "http://127.0.0.1:9 gives no answer"),
        ({"--endpoint-key-env": "UNSET", "--endpoint": "http://x"}, "UNSET is not set"),
        ({"--out": "file/data"}, "cannot write to file/data: Not a directory"),
        ({"--out": "file"}, "cannot write to file: Not a directory"),
        ({"--device": "abacus"}, "--device 'abacus' is unknown"),
    ],
)
def test_what_needs_no_model_is_found_before_one_is_read(
    changes: dict[str, str], message: str, command: Shell, prompts: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    options = {"--model": "/missing", "--prompts": prompts, "--out": "data"} | changes
    assert command("prepare", *(word for pair in options.items() for word in pair)) == 2
    assert message in command.err
    assert command.err.count("\n") == 2  # and a hint
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_refused_key_ends_it_at_once(command: Shell, prompts: str, tmp_path: Path) -> None:
    options = ("--model", "/missing", "--prompts", prompts, "--out", str(tmp_path / "d"))
    with serving(lambda body: (500, {}), models=(401, {"message": "no such key"})) as (url, asked):
        assert command(*PREPARE, *options, "--endpoint", url) == 2
    assert "gives no answer: HTTP 401: no such key" in command.err
    assert asked == []


def test_a_folder_of_other_options_is_refused(
    command: Shell, model: str, prompts: str, data: str
) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--out", data, "--temperature", "1")
    assert command(*PREPARE, *arguments) == 2
    assert "was prepared with other options" in command.err


def test_a_folder_that_another_process_writes_to_is_refused(
    command: Shell, model: str, prompts: str, tmp_path: Path
) -> None:
    arguments = ("--model", model, "--prompts", prompts, "--out", str(tmp_path / "d"))
    with held_folder(tmp_path / "d"):
        assert command(*PREPARE, *arguments) == 2
    assert "another process is writing to" in command.err


SIGNALS = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


@pytest.fixture
def handled() -> Iterator[None]:
    """SIGINT and SIGTERM as the process of a command takes them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, raise_interruption) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@SIGNALS
def test_a_signal_that_torch_makes_another_error_of_is_no_fault(
    command: Shell, model: str, prompts: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, handled: None, number: int, code: int,
) -> None:  # fmt: skip
    class Interrupted:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> float:
            signal.raise_signal(number)
            return 1.0

    def stopped(self: EmbeddedAnswers) -> Any:
        with pytest.raises(ValueError, match="could not determine the shape") as caught:
            torch.asarray(Interrupted())
        raise caught.value

    monkeypatch.setattr(EmbeddedAnswers, "collect", stopped)
    arguments = ("--model", model, "--prompts", prompts, "--out", str(tmp_path / "d"))
    assert command(*PREPARE, *arguments) == code
    assert "unexpected" not in command.err


@SIGNALS
def test_a_signal_keeps_what_is_answered_and_says_how_to_go_on(
    command: Shell, model: str, prompts: str, data: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, handled: None, number: int, code: int,
) -> None:  # fmt: skip
    out = tmp_path / "d"
    arguments = (*PREPARE, "--model", model, "--prompts", prompts, "--out", str(out))
    collect, calls = EmbeddedAnswers.collect, itertools.count()

    def stopped(self: EmbeddedAnswers) -> Any:
        if next(calls) == 2:
            signal.raise_signal(number)
        return collect(self)

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddedAnswers, "collect", stopped)
        assert command(*arguments, "--max-num-seqs", "1") == code
    assert f"interrupted: {out} keeps 2 rows; give the same command again to go on" in command.err
    assert command(*arguments, "--json") == 0
    assert (command.json["rows"], command.json["already_done"]) == (8, 2)
    found, expected = (
        {row.id: row.token_ids.tolist() for row in map(d.__getitem__, range(8))}
        for d in (Dataset(out), Dataset(Path(data)))
    )
    assert found == expected


def test_rows_are_for_whoever_the_umask_allows(
    command: Shell, model: str, prompts: str, tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        arguments = ("--model", model, "--prompts", prompts, "--out", str(tmp_path / "d"))
        assert command(*PREPARE, *arguments, "--limit", "1") == 0
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "d").iterdir()} == {0o640}


def test_prepare_ends_without_a_word_of_nanobind(model: str, prompts: str, tmp_path: Path) -> None:
    """Objects that are frozen out of the garbage collection are leaks to Triton's bindings."""
    code = "import triton, peagle.__main__; peagle.__main__.run()"
    arguments = ("--model", model, "--prompts", prompts, "--out", str(tmp_path / "d"))
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", code, *PREPARE, *arguments, "--limit", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "nanobind" not in done.stderr

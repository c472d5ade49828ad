"""`peagle serve`: the line, the errors, and a whole run with a vLLM that is none."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import IO

import pytest

from tests.backends.fake_vllm import free_port, is_running, path_with, write_fake_vllm

from .fakes import Shell

VLLM = ("serve", "--backend", "vllm", "--print-command")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_printed_line_is_all_of_stdout(shell: Shell) -> None:
    assert shell(*VLLM, "gpt-oss-20b", "--port", "9", "--host", "::1", "--max-num-seqs", "64") == 0
    words = shlex.split(shell.out)
    assert shell.out.count("\n") == 1
    assert words[:3] == ["vllm", "serve", "openai/gpt-oss-20b"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["model"] == "amazon/gpt-oss-20b-p-eagle"
    assert words[words.index("--max-num-seqs") + 1] == "64"
    assert words[-4:] == ["--host", "::1", "--port", "9"]
    assert shell.err == ""


def test_vllm_s_own_flags_follow_after_two_dashes(shell: Shell) -> None:
    assert shell(*VLLM, "org/m", "--", "--enable-log-requests", "--uds", "/tmp/s") == 0
    assert shell.out == "vllm serve org/m --enable-log-requests --uds /tmp/s\n"


def test_the_example_in_the_docs_is_what_is_printed(shell: Shell) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    example = text.split("    $ peagle ")[1].replace("\\\n", " ")
    asked, printed = example.split("    vllm serve ")
    assert shell(*shlex.split(asked)) == 0
    assert shell.out == f"vllm serve {printed.splitlines()[0]}\n"


def test_a_head_that_must_be_exported_comes_with_the_command(
    shell: Shell, model: str, head: str, cache: Path
) -> None:
    assert shell(*VLLM, model, "--spec-model", head, "--spec-tokens", "2") == 0
    words = shlex.split(shell.out)
    out = json.loads(words[words.index("--speculative-config") + 1])["model"]
    assert Path(out).parent == cache / "exports"
    comment, export = shell.err.splitlines()
    assert comment.startswith("#")
    expected = ["peagle", "export", head, out, "--to", "vllm", "--model", model]
    assert shlex.split(export) == expected
    assert not cache.exists()


def test_what_could_not_be_confirmed_is_said_beside_the_line(shell: Shell) -> None:
    assert shell(*VLLM, "gemma-4-31b-it") == 0
    assert "google/gemma-4-31B-it" in shell.out
    assert shell.err.startswith("note: ")
    assert "could not be confirmed" in shell.err


def test_the_deepest_k_of_a_head_is_allowed(shell: Shell) -> None:
    assert shell(*VLLM, "gpt-oss-20b", "--spec-tokens", "10") == 0
    assert '"num_speculative_tokens": 10' in shell.out


def test_released_models_are_listed_with_their_heads(shell: Shell) -> None:
    assert shell("heads", "--json") == 0
    assert "gpt-oss-20b" in {head["target"] for head in shell.json["released"]}
    assert {head["path"] for head in shell.json["shipped"]}
    assert shell("heads") == 0
    assert "amazon/gpt-oss-120b-p-eagle" in shell.out
    assert "amazon/gemma-4-31B-it-P-EAGLE (not confirmed)" in shell.out


def test_json_takes_vllm_s_keys(shell: Shell) -> None:
    given = {"method": "eagle3", "model": "org/h", "num_speculative_tokens": 2, "quantization": "q"}
    assert shell(*VLLM, "org/m", "--speculative-config", json.dumps(given)) == 0
    words = shlex.split(shell.out)
    assert json.loads(words[words.index("--speculative-config") + 1]) == given


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["serve", "org/m", "--print-command"], "are vLLM's", "add --backend vllm"),
        (["serve", "org/m", "--", "--uds", "x"], "are vLLM's", "add --backend vllm"),
        (["serve", "org/m", "--kv-cache-dtype", "fp8"], "not supported", "add --backend vllm"),
        (
            [*VLLM, "org/m", "--api-key", "x"],
            "--api-key is an option of the embedded",
            "after `--`",
        ),
        ([*VLLM, "org/m", "--batch-invariant"], "--batch-invariant is an option", "drop it"),
        (["serve", "org/m", "--max-n", "0"], "--max-n 0", ">= 1"),
        (["serve", "org/m", "--port", "70000"], "--port 70000", "65535"),
        ([*VLLM, "gpt-oss-20"], "no model 'gpt-oss-20'", "did you mean gpt-oss-20b?"),
        (["serve", "gpt-oss-20b"], "only --backend vllm knows", "openai/gpt-oss-20b"),
        (["serve", "m", "--host", "host.invalid"], "cannot listen on host.invalid", "check --host"),
        (["serve", "m", "--api-key-file", "no"], "--api-key-file: cannot read", "check the path"),
        (
            ["serve", "m", "--ssl-certfile", "no", "--ssl-keyfile", "no"],
            "--ssl-certfile and --ssl-keyfile: cannot read: No such file",
            "check the path",
        ),
        ([*VLLM, "org/m", "stray"], "unexpected argument 'stray'", "after `--`"),
        ([*VLLM, "org/m", "--", "--port=1"], "--port after `--`", "before `--`"),
        ([*VLLM, "org/m", "--", "-tp", "2"], "-tp after `--`", "before `--`"),
        ([*VLLM, "org/m", "--", "--speculative-config.model=x"], "after `--`", "before `--`"),
        ([*VLLM, "org/m", "--", "--no-enforce_eager"], "--enforce-eager after", "before `--`"),
        ([*VLLM, "org/m", "--spec-model", "no-head"], "no head 'no-head'", "shipped head"),
        ([*VLLM, "gpt-oss-20b", "--spec-tokens", "11"], "was trained for 10", "--spec-tokens 10"),
        ([*VLLM, "org/m", "--spec-tokens", "3"], "needs a head", "--spec-model"),
        (
            [*VLLM, "org/m", "--spec-tokens", "3", "--speculative-config", "{}"],
            "both given",
            "one of the two",
        ),
        ([*VLLM, "org/m", "--speculative-config", "{"], "not valid JSON", "quote"),
        ([*VLLM, "org/m", "--port", "99999999"], "--port 99999999 is out of range", "<= 65535"),
        ([*VLLM, "org/m", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0", ">= 1"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(
    shell: Shell, args: list[str], error: str, hint: str
) -> None:
    assert shell(*args) == 2
    lines = shell.err.splitlines()
    assert len(lines) == 2
    assert error in lines[0]
    assert hint in lines[1]
    assert shell.out == ""


def test_a_target_with_a_head_for_another_is_refused(
    shell: Shell, model: str, tmp_path: Path
) -> None:
    assert shell(*VLLM, model, "--spec-model", "smollm2-135m-p-eagle") == 2
    assert "was made for another target: hidden size 576" in shell.err


class Running:
    """`peagle serve` in a process of its own, with the fake vLLM on its PATH."""

    def __init__(self, folder: Path, *args: str, **environment: str) -> None:
        self.script = write_fake_vllm(folder)
        self.port = free_port()
        self.pids_file = folder / "pids"
        code = "from peagle.__main__ import run; run()"
        base = ("serve", "org/m", "--backend", "vllm", "--port", str(self.port))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *base, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"PATH": path_with(self.script.parent), "FAKE_VLLM_PIDS": str(self.pids_file)}
            | environment,
        )

    def read_until(self, start: str) -> str:
        stream: IO[str] | None = self.process.stderr
        assert stream is not None
        for line in stream:
            if line.startswith(start):
                return line
        raise AssertionError(f"no line starts with {start!r}")

    def finish(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=30)
        left = [pid for pid in map(int, self.pids_file.read_text().split()) if is_running(pid)]
        assert left == []
        return out, err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_runs_until_it_is_told_to_stop(tmp_path: Path, number: int, code: int) -> None:
    running = Running(tmp_path)
    assert running.read_until("starting vLLM 0.32.0: ").count(" serve org/m --port ") == 1
    ready = running.read_until("ready: ")
    assert ready == f"ready: http://127.0.0.1:{running.port}/v1\n"
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/health") as answer:
        assert answer.status == 200
    running.process.send_signal(number)
    out, err = running.finish()
    assert running.process.returncode == code
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.slow
def test_vllm_dying_at_its_start_is_one_error_with_its_words(tmp_path: Path) -> None:
    running = Running(tmp_path, FAKE_VLLM="dies")
    _, err = running.finish()
    assert running.process.returncode == 2
    assert err.splitlines()[-2:] == [
        "error: vLLM died at its start: ValueError: no such head",
        "hint: its log is above",
    ]


@pytest.mark.slow
def test_a_server_that_only_computes_is_not_asked_for_its_health(tmp_path: Path) -> None:
    running = Running(tmp_path, "--", "--headless")
    running.read_until("INFO starting")
    running.process.send_signal(signal.SIGTERM)
    running.finish()
    assert running.process.returncode == 0


def test_missing_vllm_is_an_error_but_not_for_the_line(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert shell("serve", "org/m", "--backend", "vllm") == 2
    assert shell.err.startswith("error: vLLM is not installed")
    assert shell(*VLLM, "org/m") == 0


def test_an_old_vllm_and_a_taken_port_are_found_before_the_start(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", path_with(write_fake_vllm(tmp_path).parent))
    monkeypatch.setenv("FAKE_VLLM_PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("FAKE_VLLM_VERSION", "0.15.0")
    assert shell("serve", "org/m", "--backend", "vllm") == 2
    assert "vLLM 0.15.0" in shell.err
    monkeypatch.delenv("FAKE_VLLM_VERSION")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert shell("serve", "org/m", "--backend", "vllm", "--port", port) == 2
    assert f"cannot listen on *:{port}" in shell.err
    assert not (tmp_path / "pids").exists()

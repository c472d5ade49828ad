"""What a user sees when something goes wrong, in a process of its own where that matters."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peagle import __version__
from peagle.errors import ModelError

from .fakes import FakeLLM, Shell


def _start(body: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own, with `build_llm` replaced by `body`."""
    code = textwrap.dedent("""
        import sys, time
        from peagle.cli import engines
        from peagle.__main__ import run
        from peagle.errors import ModelError
        def build_llm(*_):
        {body}
        engines.build_llm = build_llm
        run()
    """).format(body=textwrap.indent(body, "    "))
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


UNKNOWN = 'raise ModelError("no model\\nnamed m", hint="give a folder")'


def test_user_error_is_one_line_a_hint_and_exit_2() -> None:
    process = _start(UNKNOWN, "generate", "m", "Hi")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert out == ""
    assert err == "error: no model named m\nhint: give a folder\n"


def test_debug_shows_the_traceback_as_well() -> None:
    process = _start(UNKNOWN, "generate", "m", "Hi", PEAGLE_DEBUG="1")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "Traceback" in err


def test_our_own_mistake_has_no_traceback_and_exits_1() -> None:
    process = _start("raise TypeError('oops')", "generate", "m", "Hi")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.splitlines()[0] == "error: unexpected TypeError: oops"
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_its_conventional_code_and_no_traceback(number: int, code: int) -> None:
    sleeping = "print('ready', flush=True); time.sleep(20)"
    process = _start(sleeping, "generate", "m", "Hi")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported_does_as_well(number: int, code: int) -> None:
    script = f"""
import os, sys
from peagle.__main__ import run
class Signal:  # at the first import of typer
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Signal())
run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("args", [["--help"], ["heads"], ["env", "--json"]])
def test_a_closed_pipe_is_silent_and_ends_as_by_sigpipe(args: list[str]) -> None:
    process = _start("pass", *args)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 141


@pytest.mark.parametrize(
    ("redirection", "error"),
    [
        ("> /dev/full", "error: cannot write: No space left on device"),
        (">&-", "error: stdout is closed"),
        (">&- 2>&-", ""),
    ],
)
@pytest.mark.parametrize("verb", ["heads", "--help"])
def test_a_stdout_that_takes_nothing_is_the_users_error(
    redirection: str, error: str, verb: str
) -> None:
    line = f"{sys.executable} -m peagle {verb} {redirection}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[:1] == ([error] if error else [])
    assert len(lines) == (2 if error else 0)


def test_text_that_stdout_cannot_express_is_the_users_error(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.make = functools.partial(FakeLLM, answer="é")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert shell("generate", "m", "Hi") == 2
    assert shell.err.splitlines() == [
        "error: ascii cannot express '\\xe9'",
        "hint: set PYTHONIOENCODING=utf-8",
    ]
    assert shell("generate", "m", "Hi", "--json") == 0
    document = json.loads(stdout.buffer.getvalue())  # type: ignore[attr-defined]
    assert document["results"][0]["outputs"][0]["text"] == "é"


@pytest.mark.parametrize(
    "error",
    [MemoryError("big"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")],
)
def test_a_lack_of_memory_is_the_users_error(shell: Shell, error: Exception) -> None:
    def refuse(*_: object) -> None:
        raise error

    shell.make = refuse
    assert shell("generate", "m", "Hi") == 2
    assert shell.err.startswith("error: out of memory: ")


def test_a_file_that_no_verb_expected_to_fail_is_the_users_error(shell: Shell) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/etc/secret")

    shell.make = refuse
    assert shell("generate", "m", "Hi") == 2
    error, hint = shell.err.splitlines()
    assert error == "error: /etc/secret: Permission denied"
    assert hint == "hint: check its permissions, or name another place"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["generate", "m", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "m", "--nothing-like-it"], "see peagle generate --help"),
        (["generate", "m", "-hello"], "write -- before a text that begins with a dash"),
        (["generate"], "see peagle generate --help"),
        (["chat", "m", "--json"], "see peagle chat --help"),
        (["export", "h", "o", "--to", "gguf"], "see peagle export --help"),
        (["generate", "m", "--max-tokens", "9" * 20], "use fewer digits"),
        (["generate", "m", "--temperature", "nan"], "use a finite number"),
        (
            ["generate", "m", "--speculative-config.foo", "1"],
            "known: method, model, num_speculative_tokens, num_draft_nodes, speculation, "
            "prompt_lookup_max, prompt_lookup_min, verification, parallel_drafting",
        ),
        (["nothing"], "see peagle --help"),
    ],
)
def test_usage_errors_have_the_same_form(shell: Shell, args: list[str], hint: str) -> None:
    assert shell(*args) == 2
    error, last = shell.err.splitlines()
    assert error.startswith("error: ")
    assert "Value error" not in error
    assert "Possible options" not in error
    assert last == f"hint: {hint}"


def test_nearest_verb_is_named(shell: Shell) -> None:
    assert shell("genrate") == 2
    assert "Did you mean 'generate'?" in shell.err


def test_unknown_log_level_is_a_user_error(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_LOG_LEVEL", "loud")
    assert shell("heads") == 2
    assert "PEAGLE_LOG_LEVEL=LOUD is not a level" in shell.err


def test_version_and_bare_command_exit_0(shell: Shell) -> None:
    assert shell("--version") == 0
    assert shell.out == f"peagle {__version__}\n"
    assert shell() == 0
    assert "generate" in shell.out


def test_env_names_hardware_and_versions(shell: Shell) -> None:
    assert shell("env") == 0
    assert "hardware cpu" in shell.out
    assert shell("env", "--json") == 0
    assert shell.json["versions"]["peagle"] == __version__
    assert shell.json["hardware"]["cores"] >= 1


def test_env_names_kernels_compiler_triton_vllm_and_the_cache(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    monkeypatch.setenv("PEAGLE_CPU_KERNELS", "0")
    monkeypatch.setenv("CC", "my-cc -v")
    assert shell("env", "--json") == 0
    engines = shell.json["engines"]
    assert engines.keys() == {"cpu kernels", "compiler", "triton", "vllm", "cache folder"}
    assert engines["cpu kernels"] == "torch's own operations"
    assert (engines["compiler"], engines["cache folder"]) == ("my-cc -v", str(tmp_path))
    assert shell("env") == 0
    assert f"engines cache folder   {tmp_path}" in shell.out


def test_error_hint_is_optional(shell: Shell) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("broken")

    shell.make = refuse
    assert shell("generate", "m", "Hi") == 2
    assert shell.err == "error: broken\n"


@pytest.mark.parametrize(("no_color", "start"), [("", "\033[1;31merror:\033[0m"), ("1", "error:")])
def test_errors_are_red_on_a_terminal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, no_color: str, start: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert shell("generate") == 2
    assert shell.err.startswith(f"{start} Missing argument")

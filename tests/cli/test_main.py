"""What a user sees when something goes wrong, in a process of its own where that matters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peagle import __version__
from peagle.errors import ModelError

from .fakes import Shell


def _start(body: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own, with `build_llm` replaced by `body`."""
    code = textwrap.dedent("""
        import sys, time
        from peagle.cli import engines
        from peagle.cli.main import run
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


def test_ctrl_c_exits_130_without_a_traceback() -> None:
    sleeping = "print('ready', flush=True); time.sleep(20)"
    process = _start(sleeping, "generate", "m", "Hi")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_reader_that_goes_away_is_no_error() -> None:
    process = _start("pass", "--help")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(timeout=20)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["generate", "m", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "m", "--nothing-like-it"], "see peagle generate --help"),
        (["generate", "m", "-hello"], "write -- before a text that begins with a dash"),
        (["generate"], "see peagle generate --help"),
        (["nothing"], "see peagle --help"),
    ],
)
def test_usage_errors_have_the_same_form(shell: Shell, args: list[str], hint: str) -> None:
    assert shell(*args) == 2
    error, last = shell.err.splitlines()
    assert error.startswith("error: ")
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

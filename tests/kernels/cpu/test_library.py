"""Where the kernels cannot be compiled, there are none, and the engine answers all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.kernels.cpu import ops
from peagle.kernels.cpu.library import load_library
from peagle.models import layers
from tests.kernels.cpu.compiler import needs_kernels
from tests.tolerance import near

ROOT = Path(__file__).parents[3]
# A class-wide cache would carry one test's answer into the next.
compiled_kernels = ops.cpu_kernels.__wrapped__


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PEAGLE_CACHE", str(folder))
    monkeypatch.delenv("PEAGLE_CPU_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)
    ops.cpu_kernels.cache_clear()
    yield folder
    ops.cpu_kernels.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@needs_kernels
def test_the_library_is_compiled_once_and_nothing_else_is_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_kernels() is not None
    (library,) = [p for p in cache.rglob("*") if p.is_file()]
    assert library.name == "ops.so"
    monkeypatch.setenv("CC", "false")
    assert compiled_kernels() is not None


@needs_kernels
def test_another_source_is_another_library(tmp_path: Path, cache: Path) -> None:
    for text in ("int one(void) { return 1; }", "int one(void) { return 2; }"):
        source = tmp_path / "some.c"
        source.write_text(text)
        assert load_library(source) is not None
    assert len(list(cache.rglob("some.so"))) == 2


@needs_kernels
def test_flags_of_the_environment_are_heeded_and_make_another_library(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "some.c"
    source.write_text("int number(void) { return NUMBER; }")
    for number in (1, 2):
        monkeypatch.setenv("PEAGLE_CFLAGS", f"-DUNUSED='a b' -DNUMBER={number}")
        library = load_library(source)
        assert library is not None
        assert library.number() == number
    assert len(list(cache.rglob("some.so"))) == 2


@pytest.mark.slow
@needs_kernels
def test_processes_that_compile_at_once_all_get_the_kernels(cache: Path) -> None:
    code = "from peagle.kernels.cpu.ops import cpu_kernels; assert cpu_kernels() is not None"
    jobs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0]
    assert len([p for p in cache.rglob("*") if p.is_file()]) == 1


def test_zero_in_the_environment_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_CPU_KERNELS", "0")
    assert compiled_kernels() is None


def test_without_a_compiler_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled_kernels() is None


@pytest.mark.parametrize(
    "text", ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"', "exit 0"]
)
def test_a_compiler_that_fails_or_makes_no_library_gives_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", script(tmp_path / "cc", text))
    assert compiled_kernels() is None


def test_a_compiler_that_is_not_there_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert compiled_kernels() is None


def test_a_cache_that_cannot_be_written_gives_none(cache: Path) -> None:
    cache.write_text("a file stands where the folder should")
    assert compiled_kernels() is None


def test_the_layers_work_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with torch.inference_mode():
        x = torch.randn(2, 8)
        assert ops.kernels_for(x) is None
        norm = layers.RMSNorm(8, 1e-5)
        expected = torch.nn.functional.rms_norm(x, (8,), eps=1e-5)
        torch.testing.assert_close(norm(x), expected, **near(terms=8))


ANSWER = """
import torch
from tests.tiny.models import CONTEXT, SHALLOW
from peagle.config import EngineConfig
from peagle.engine.engine import Engine
from peagle.kernels.cpu.ops import cpu_kernels
from peagle.models.binding import pack_weights
from peagle.sampling_params import SamplingParams

target = SHALLOW.make_target(torch.float32)
pack_weights(target)
engine = Engine(target, EngineConfig(max_model_len=CONTEXT))
params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
requests = [engine.add_request(str(n), [n + 1, 5, 9], params) for n in range(3)]
while engine.has_unfinished:
    engine.step()
print(cpu_kernels() is not None, [r.output_token_ids for r in requests])
"""


def answers(*environments: dict[str, str]) -> list[list[str]]:
    """Of processes side by side: most of their time is spent on imports."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", ANSWER],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    outputs = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * len(jobs)
    return [text.split(maxsplit=1) for text in outputs]


@pytest.mark.slow
@needs_kernels
def test_the_engine_generates_the_same_without_kernels_as_with_them() -> None:
    on, off = answers({}, {"CC": "/nowhere/cc", "PEAGLE_CACHE": "/nowhere"})
    assert (on[0], off[0]) == ("True", "False")
    assert on[1] == off[1]

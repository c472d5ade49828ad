"""The examples, and the README's Python, run and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.network, pytest.mark.slow]


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def readme_script() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    return str(block)


def test_python_of_the_readme_runs() -> None:
    out = run("-c", readme_script())
    assert "The capital of France is Paris" in out
    assert float(out.split("mean acceptance length: ")[1]) > 1.5


def test_generation_with_a_drafter_gives_the_tokens_of_plain_decoding() -> None:
    out = run(ROOT / "examples/generate.py")
    assert out.count("as without a drafter: True") == 2


def test_streamed_text_grows_to_a_whole_answer() -> None:
    assert len(run(ROOT / "examples/stream.py").split()) > 5


def test_a_head_is_prepared_trained_evaluated_and_used(tmp_path: Path) -> None:
    out = run(ROOT / "examples/train_head.py", tmp_path)
    assert "mean acceptance length" in out
    assert (tmp_path / "run/head/model.safetensors").is_file()


def test_a_benchmark_is_measured_and_read(tmp_path: Path) -> None:
    out = run(ROOT / "examples/bench.py", tmp_path / "bench")
    assert "p-eagle K = 5" in out
    assert "answers that differ from plain decoding's: 0" in out

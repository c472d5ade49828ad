"""Imports go one way, and help costs nothing."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import peagle

PACKAGE = Path(peagle.__file__).parent

# Lowest first; a module may import from its own layer or a lower one.
LAYERS = (
    {"cache", "config", "errors", "files", "http", "locking", "log", "processes", "provenance"}
    | {"sampling_params"},
    {"speculation", "data"},
    {"outputs"},  # results carry their acceptance statistics
    {"kernels"},
    {"models"},
    {"teacher_forcing"},  # what training and offline evaluation share
    {"checkpoints"},
    {"engine"},
    {"backends"},
    {"deploy"},
    {"prepare"},
    {"evaluate"},
    {"bench", "train"},
    {"doctor"},
    {"cli", "__main__"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def _part(module: str) -> str:
    """`peagle.engine.llm` -> `engine`; `peagle` itself is '' and may be imported by all."""
    return [*module.split("."), ""][1]


def _imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, types and lazy imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or ""}
            if node.module == "peagle":  # `from peagle import engine`
                found |= {f"peagle.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "peagle"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_lower_layer_never_imports_a_higher_one(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return  # the front door: re-exports LLM and SamplingParams, lazily
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in RANK, f"{own} has no layer: add it to LAYERS"
    for module in _imports(path):
        part = _part(module)
        assert RANK.get(part, 0) <= RANK[own], f"{own} imports {module}"


HELP = "import sys; sys.argv = ['peagle', '--help']; from peagle.__main__ import run; run()"
HEAVY = (
    *("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "gguf", "httpx"),
    *("boto3", "botocore"),
)


@pytest.mark.parametrize("code", ["import peagle", HELP], ids=["import", "help"])
def test_import_and_help_load_nothing_heavy(code: str) -> None:
    report = (
        f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "peagle" in loaded
    assert not loaded & set(HEAVY)


def test_help_takes_less_than_half_a_second_of_cpu() -> None:
    # CPU time, not wall time, and the best of three: the claim is about us, not the machine's load.
    assert min(_cpu_seconds(HELP) for _ in range(3)) < 0.5


def _cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)

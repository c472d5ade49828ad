"""A machine without a GPU never sees Triton."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import peagle

PACKAGE = Path(peagle.__file__).parent
KERNELS = "peagle.kernels.gpu"
IMPORTS_TRITON = re.compile(r"\s*(import|from) triton\b")
HELP = "import sys; sys.argv = ['peagle', '--help']; from peagle.__main__ import run; run()"
ENGINE = """
import torch
from transformers import LlamaConfig
from peagle.config import EngineConfig
from peagle.engine.engine import Engine, Speculation
from peagle.engine import llm, loading
from peagle.models.config import DecoderConfig
from peagle.models.fp8 import quantize_linears
from peagle.models.ngram import NgramDrafter
from peagle.models.target import TargetModel
from peagle.sampling_params import SamplingParams

config = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
for quantized in (False, True):
    target = TargetModel(DecoderConfig.from_transformers(config)).requires_grad_(False)
    if quantized:
        quantize_linears(target)
    engine = Engine(target, EngineConfig(), speculation=Speculation(NgramDrafter(1, 4), 3))
    greedy = engine.add_request("0", [1, 2, 1, 2], SamplingParams(temperature=0.0, max_tokens=6))
    drawn = engine.add_request("1", [3, 4, 3], SamplingParams(seed=1, top_p=0.9, max_tokens=6))
    while engine.has_unfinished:
        engine.step()
    assert greedy.num_outputs == drawn.num_outputs == 6
"""


# torch looks for Triton itself where it is installed: here it is made to be missing.
WITHOUT_TRITON = """
import atexit, os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.modules["triton"] = None
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["import peagle", HELP, ENGINE], ids=["import", "help", "engine on a CPU"]
)
def test_nothing_needs_triton_on_a_cpu(code: str) -> None:
    run = [sys.executable, "-c", WITHOUT_TRITON + code]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "peagle" in loaded
    assert not {name for name in loaded if name.startswith("peagle.kernels.gpu")}


def test_triton_is_imported_by_its_kernels_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        imports = [line for line in path.read_text().splitlines() if IMPORTS_TRITON.match(line)]
        assert not imports or path.parent == PACKAGE / "kernels" / "gpu", path


def test_modules_import_the_kernels_only_where_tensors_are_on_a_gpu() -> None:
    """At a module's top such an import would reach machines without one."""
    for path in PACKAGE.rglob("*.py"):
        if path.parent != PACKAGE / "kernels" / "gpu":
            for node in ast.parse(path.read_text()).body:
                assert not _names_gpu_kernels(node), f"{path}, line {node.lineno}"


def _names_gpu_kernels(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.startswith(KERNELS) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return any(name.startswith(KERNELS) for name in names)
    return False


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_waiting_threads_soon_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], expected: str
) -> None:
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    code = "import os, sys, peagle; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=inherited | given
    )
    assert done.stdout.split() == [expected, "False"]

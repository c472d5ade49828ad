"""What answering a prompt may import: the rest costs seconds before the first token."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

REPORT = (
    "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
    "from peagle.__main__ import run; run()"
)
# transformers builds a table of all its models; torch's compiler and DTensor come with its models.
SLOW = ("transformers", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


@pytest.mark.parametrize(("drafter", "raw"), [("none", []), ("ngram", ["--raw"]), ("head", [])])
def test_an_answer_needs_neither_transformers_nor_torchs_compiler(
    drafter: str, raw: list[str], model: str, head: str
) -> None:
    flags = ["--spec-model", head] if drafter == "head" else ["--spec-method", drafter]
    command = ["generate", model, "Hi", "--max-tokens", "4", *flags, *raw]
    done = subprocess.run([sys.executable, "-c", REPORT, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stderr.split())
    assert "torch" in loaded
    assert not loaded & set(SLOW)

"""README's script on vLLM itself, and our tables of its arguments beside its own defaults."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from peagle.checkpoints.heads.exporting import export_head
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.references import resolve_model
from peagle.compatibility import (
    GENERATE_ARGUMENTS,
    LLM_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    SPECULATIVE_ARGUMENTS,
    drop_unused,
)
from peagle.errors import ConfigError
from tests.test_examples import readme_script

pytestmark = pytest.mark.vllm

MODEL, HEAD = "smollm2-135m", "smollm2-135m-p-eagle"


@pytest.mark.network
@pytest.mark.slow
def test_readmes_script_runs_on_vllm_as_it_stands(tmp_path: Path) -> None:
    """In a folder in which its two names are folders, which both engines then read."""
    (tmp_path / MODEL).symlink_to(resolve_model(MODEL))
    assert resolve_head(HEAD).is_dir()
    export_head(HEAD, MODEL, tmp_path / HEAD, "vllm")
    for library in ("peagle", "vllm"):
        said = _said(library, tmp_path)
        assert "The capital of France is Paris" in said
        assert float(said.split("mean acceptance length: ")[1].split()[0]) > 1.5


def _said(library: str, folder: Path) -> str:
    script = readme_script().replace("from peagle import", f"from {library} import")
    # Compiling takes minutes, and what is compiled is not looked at.
    quick = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=quick, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _defaults(call: Any) -> dict[str, Any]:
    """A function's keywords and their defaults."""
    parameters = inspect.signature(call).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_vllms_own_defaults_are_accepted() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    engine = {f.name: f.default for f in fields(EngineArgs) if f.default is not MISSING}
    speculative = {f.name: f.default for f in fields(SpeculativeConfig)}
    params = SamplingParams()
    sampling = {n: getattr(params, n) for n in SAMPLING_ARGUMENTS if hasattr(params, n)}
    cases = [
        (_defaults(LLM.__init__), LLM_ARGUMENTS),
        (engine, LLM_ARGUMENTS),
        (_defaults(LLM.generate), GENERATE_ARGUMENTS),
        (_defaults(LLM.chat), GENERATE_ARGUMENTS),
        (sampling, SAMPLING_ARGUMENTS),
        (speculative, SPECULATIVE_ARGUMENTS),
    ]
    for defaults, table in cases:
        plain = {k: getattr(v, "default", v) for k, v in defaults.items()}  # of pydantic's fields
        known = {k: v for k, v in plain.items() if k in table and v is not MISSING}
        known.pop("generation_config", None)  # "auto" does mean something: docs/python.md
        assert drop_unused(known, table, ConfigError) == {}


def test_every_named_argument_of_vllms_calls_is_taken_or_refused_with_a_reason() -> None:
    """Nothing that vLLM's signatures name is an "unexpected keyword" here."""
    from vllm import LLM as VllmLLM
    from vllm import SamplingParams as VllmParams

    from peagle import LLM, SamplingParams
    from peagle.config import EngineConfig

    ours = {f.name for f in fields(EngineConfig)} | set(_defaults(LLM.__init__))
    assert set(_defaults(VllmLLM.__init__)) <= ours | LLM_ARGUMENTS.keys()
    for call, own in ((VllmLLM.generate, LLM.generate), (VllmLLM.chat, LLM.chat)):
        assert set(_defaults(call)) <= set(_defaults(own)) | GENERATE_ARGUMENTS.keys()
    public = {name for name in VllmParams.__struct_fields__ if not name.startswith("_")}
    internal = {"output_text_buffer_length"}
    own = {f.name for f in fields(SamplingParams)}
    assert public - internal <= own | SAMPLING_ARGUMENTS.keys()

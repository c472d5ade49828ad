"""Sizes and limits of the engine: the fields of EngineConfig, as flags."""

from __future__ import annotations

import inspect
from dataclasses import fields

from peagle.backends import BackendName
from peagle.cli.flags import ConfigFlags, doc_of, field_flag
from peagle.config import EngineConfig

NOT_A_FLAG = ("seed",)  # --seed is of the requests


class EngineFlags(ConfigFlags):
    """None where a flag is not given: defaults are the embedded engine's, vLLM has its own."""

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        names = [field.name for field in fields(EngineConfig) if field.name not in NOT_A_FLAG]
        return [
            field_flag(EngineConfig, name, "Engine", note=_default_note(name)) for name in names
        ]

    def config(self, backend: BackendName = "embedded") -> EngineConfig:
        given = dict(self.given)
        if backend == "vllm":  # VllmOptions carries it: vLLM knows more kinds than we do
            given.pop("quantization", None)
        return EngineConfig(**given)


def _default_note(name: str) -> str:
    default = getattr(EngineConfig, name)
    doc = doc_of(EngineConfig, name)
    words = doc.if_none if default is None and doc else default
    return f"Embedded default: {words}." if words else ""

"""Where a verb gets an engine, and heads that come with the package: tests put fakes here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from peagle.config import EngineConfig, SpeculativeConfig

if TYPE_CHECKING:
    from peagle.backends.contract import Backend
    from peagle.backends.vllm.options import VllmOptions
    from peagle.checkpoints.heads.references import HeadInfo
    from peagle.engine.llm import LLM


def build_llm(model: str, engine: EngineConfig, drafter: SpeculativeConfig | None) -> LLM:
    """The embedded engine."""
    from peagle.engine.llm import LLM

    return LLM(model, speculative_config=drafter, **asdict(engine))


def build_backend(
    model: str,
    engine: EngineConfig,
    drafter: SpeculativeConfig | None,
    vllm: VllmOptions | None,
) -> Backend:
    """The embedded engine, or vLLM where its options are given."""
    if vllm is None:
        return build_llm(model, engine, drafter)
    from peagle.backends.vllm.backend import VllmBackend

    return VllmBackend(model, engine, drafter, vllm)


def shipped_heads() -> list[HeadInfo]:
    """The heads that come with the package."""
    from peagle.checkpoints.heads.references import list_heads

    return list_heads()

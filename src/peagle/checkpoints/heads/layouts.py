"""Which of three layouts a head's folder has, told from its config.json alone.

native       ours: `peagle_format`, fields of HeadConfig
vllm         vLLM's raw layout: a Llama config with EAGLE-3 keys
speculators  the speculators library's: `vllm serve FOLDER` finds the target in it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from peagle.errors import HeadError

ForeignLayout = Literal["vllm", "speculators"]
Layout = Literal["native", "vllm", "speculators"]

CONFIG = "config.json"
FORMAT = "peagle_format"
FORMAT_VERSION = 1
OURS = "peagle"  # the one key in foreign layouts that holds what they have no words for

# All of these are one class in vLLM. Others, such as Eagle3Qwen3ForCausalLM, have other layers.
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
)


def layout_of(options: Mapping[str, Any], where: str) -> Layout:
    if FORMAT in options:
        return "native"
    if "speculators_model_type" in options or "speculators_config" in options:
        return "speculators"
    named = options.get("architectures")
    if isinstance(named, list) and any(name in ARCHITECTURES for name in named):
        return "vllm"
    raise HeadError(
        f"{where} is not a config of a known head: {FORMAT}, speculators_model_type and a "
        f"known architecture are missing",
        hint=f"it says architectures={named!r}; known: {', '.join(ARCHITECTURES)}",
    )


def object_at(options: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """The JSON object under a key; empty if there is none."""
    value = options.get(name)
    if value is not None and not isinstance(value, dict):
        raise HeadError(f"{where}: {name} cannot be {value!r}")
    return value or {}

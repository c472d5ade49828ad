"""The models of the P-EAGLE posts by name: a table that says what each head's card asks for."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import MappingProxyType
from typing import Any

from peagle.backends.vllm.options import VllmOptions

TABLE = "released.toml"


@dataclass(frozen=True, kw_only=True)
class ReleasedModel:
    """A target with a P-EAGLE head that others released, and how its makers serve it."""

    name: str
    target: str
    head: str
    num_speculative_tokens: int
    long_context_head: str | None = None
    max_speculative_tokens: int | None = None  # the depth it was trained for, where its card says
    confirmed: bool = True  # False: no card was found, see the table
    jumpstart_id: str | None = None  # SageMaker's name for the target
    target_gb: float  # of weights as they are stored, 1e9 bytes
    head_gb: float
    kv_values_per_token: int | None = None  # of the target's cache, all layers
    options: VllmOptions = field(default_factory=VllmOptions)

    def has_head(self, reference: str) -> bool:
        heads = (self.head, self.long_context_head)
        return reference.lower() in {head.lower() for head in heads if head}


@functools.cache
def released_models() -> Mapping[str, ReleasedModel]:
    table = tomllib.loads((resources.files("peagle.backends.vllm") / TABLE).read_text("utf-8"))
    return MappingProxyType({name: _model(name, entry) for name, entry in table.items()})


def find_released(reference: str) -> ReleasedModel | None:
    """The model of that name or JumpStart id, in any spelling of upper and lower case."""
    named = released_models()
    by_id = (m for m in named.values() if m.jumpstart_id == reference.lower())
    return named.get(reference.lower()) or next(by_id, None)


def released_with_head(reference: str) -> ReleasedModel | None:
    """The model whose head has that Hugging Face id."""
    return next((m for m in released_models().values() if m.has_head(reference)), None)


def nearest_name(reference: str, known: Iterable[str]) -> str | None:
    """What a misspelt name may have meant."""
    close = difflib.get_close_matches(reference.lower(), list(known), n=1)
    return close[0] if close else None


def _model(name: str, entry: dict[str, Any]) -> ReleasedModel:
    options = VllmOptions(**entry.pop("options", {}))
    return ReleasedModel(name=name, options=options, **entry)

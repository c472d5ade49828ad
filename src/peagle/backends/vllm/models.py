"""What a user writes for a target and a head, and what vLLM is given for it.

Built-in names become folders; a Hugging Face id goes on to vLLM as it is, unread, so that a
command can be shown without a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.backends.vllm.released import (
    find_released,
    nearest_name,
    released_models,
    released_with_head,
)
from peagle.cache import cache_folder
from peagle.checkpoints.builtin import BUILTIN_MODELS
from peagle.checkpoints.files import read_json
from peagle.checkpoints.heads.config import read_head_config
from peagle.checkpoints.heads.layouts import CONFIG, FORMAT, OURS
from peagle.checkpoints.heads.references import resolve_head
from peagle.checkpoints.heads.vllm_layout import MASK_KEYS
from peagle.checkpoints.references import is_hub_id, resolve_model
from peagle.errors import HeadError, ModelError

HeadKind = Literal["p-eagle", "eagle3"]


@dataclass(frozen=True, kw_only=True)
class Target:
    given: str  # as the user wrote it
    reference: str  # what vLLM is given
    config: Mapping[str, Any] | None = None  # its config.json where it lies on this machine
    served_name: str | None = None  # what clients call it, where that is not `reference`


@dataclass(frozen=True, kw_only=True)
class Head:
    reference: str  # a folder or a Hugging Face id
    kind: HeadKind | None  # None: its id does not tell, and nobody has read it
    native: bool = False  # in our own format: must be exported before vLLM can load it
    config: Mapping[str, Any] | None = None
    num_speculative_tokens: int | None = None  # what its makers advise
    max_speculative_tokens: int | None = None  # the depth it was trained for


def find_target(reference: str, *, fetch: bool) -> Target:
    """`fetch=False` only says where a built-in model will lie."""
    if released := find_released(reference):
        return Target(given=reference, reference=released.target)
    if is_hub_id(reference):
        return Target(given=reference, reference=reference)
    builtin = reference in BUILTIN_MODELS
    if not builtin and _is_plain_name(reference):
        raise _unknown_model(reference)
    if builtin and not fetch:
        folder = cache_folder() / "models" / reference
    else:
        folder = resolve_model(reference)
    return Target(
        given=reference,
        reference=str(folder),
        config=_config_if_there(folder),
        served_name=reference if builtin else None,
    )


def find_head(reference: str) -> Head:
    if released := released_with_head(reference):
        return Head(
            reference=reference,
            kind="p-eagle",
            num_speculative_tokens=released.num_speculative_tokens,
            max_speculative_tokens=released.max_speculative_tokens,
        )
    if is_hub_id(reference):
        return Head(reference=reference, kind=None)
    folder = resolve_head(reference)
    config = read_json(folder / CONFIG)
    native = FORMAT in config
    own = config if native else config.get(OURS) or {}  # what an export of ours says of itself
    return Head(
        reference=str(folder),
        kind=read_head_config(folder).method if native else _kind(config, folder),
        native=native,
        config={**config, **own},
        num_speculative_tokens=own.get("num_speculative_tokens", _proposed(config)),
        max_speculative_tokens=own.get("max_speculative_tokens"),
    )


def check_fits(head: Head, target: Target) -> None:
    """vLLM finds out late and says it in tensor shapes; this needs the two config files alone."""
    if head.config is None or target.config is None:
        return
    sizes = target.config.get("text_config", target.config)
    ours = head.config.get("transformer_layer_config", head.config)
    pairs = [
        ("hidden size", _first(ours, head.config, "target_hidden_size"), sizes.get("hidden_size")),
        ("vocabulary", _first(ours, head.config, "vocab_size"), sizes.get("vocab_size")),
        ("layers", head.config.get("target_num_hidden_layers"), sizes.get("num_hidden_layers")),
    ]
    wrong = [f"{name} {a} but the target has {b}" for name, a, b in pairs if a and b and a != b]
    if wrong:
        raise HeadError(
            f"{head.reference} was made for another target: {'; '.join(wrong)}",
            hint="use the target it was trained for, or train a head with `peagle train`",
        )


def _kind(config: Mapping[str, Any], folder: Path) -> HeadKind:
    named = config.get("speculators_model_type")
    if named in ("peagle", "eagle3"):
        return "p-eagle" if named == "peagle" else "eagle3"
    architectures = config.get("architectures") or []
    if named is None and any("eagle3" in str(name).lower() for name in architectures):
        # Mask rows carry a token that the config names; EAGLE-3 has no mask rows.
        return "p-eagle" if any(config.get(key) is not None for key in MASK_KEYS) else "eagle3"
    raise HeadError(
        f"{folder / CONFIG} is neither a P-EAGLE nor an EAGLE-3 head",
        hint=f"it says {json.dumps({'architectures': architectures, 'type': named})}",
    )


def _proposed(config: Mapping[str, Any]) -> int | None:
    """The K of the speculators layout."""
    proposals = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    proposed: int | None = proposals[0].get("speculative_tokens")
    return proposed


def _first(nested: Mapping[str, Any], outer: Mapping[str, Any], key: str) -> Any:
    return outer.get(key) or nested.get(key)


def _config_if_there(folder: Path) -> dict[str, Any] | None:
    return read_json(folder / CONFIG) if (folder / CONFIG).is_file() else None


def _is_plain_name(reference: str) -> bool:
    return (
        bool(reference)
        and not reference.startswith((".", "~"))
        and "/" not in reference
        and (not Path(reference).exists())
    )


def _unknown_model(reference: str) -> ModelError:
    known = [*BUILTIN_MODELS, *released_models()]
    forms = f"give a folder, a Hugging Face id (org/name), or one of: {', '.join(known)}"
    nearest = nearest_name(reference, known)
    hint = f"did you mean {nearest}? Or {forms}" if nearest else forms
    return ModelError(f"there is no model {reference!r}", hint=hint)

"""What was asked for as a drafter -> the speculative_config that vLLM gets.

A head in our own layout is exported to vLLM's first, once per head and target, into the cache.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peagle
from peagle.backends.vllm.models import Head, Target, check_fits, find_head
from peagle.backends.vllm.released import ReleasedModel, released_with_head
from peagle.cache import cache_folder
from peagle.checkpoints.builtin import BUILTIN_MODELS
from peagle.checkpoints.files import WEIGHTS, weight_files
from peagle.checkpoints.heads.layouts import CONFIG, ForeignLayout
from peagle.config import DEFAULT_SPECULATIVE_TOKENS
from peagle.errors import ConfigError
from peagle.files import sha256_of

DRAFTED_BY_HEAD = ("p-eagle", "eagle3")
LAYOUT: ForeignLayout = "vllm"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A head that has to be written in vLLM's layout before vLLM starts."""

    head: str
    target: str
    out: Path

    @property
    def command(self) -> str:
        words = ["peagle", "export", self.head, str(self.out), "--to", LAYOUT]
        return shlex.join([*words, "--model", self.target])

    @property
    def done(self) -> bool:
        return (self.out / CONFIG).is_file()  # folders are renamed into place whole

    def run(self) -> None:
        from peagle.checkpoints.heads.exporting import export_head

        if not self.done:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            export_head(self.head, self.target, self.out, LAYOUT, force=True)


@dataclass(frozen=True, kw_only=True)
class VllmDrafter:
    """The speculative_config, and what it means for other options."""

    config: Mapping[str, Any]
    rows_per_request: int | None = None  # of one pass of a parallel drafter
    export: Export | None = None  # to be done before vLLM starts
    adds_windows: bool = False  # the head's layers are the only ones with a sliding window
    notes: tuple[str, ...] = ()


def with_released_head(
    drafter: Mapping[str, Any], released: ReleasedModel | None
) -> Mapping[str, Any]:
    """The released head where no other drafter was asked for; a given K stays."""
    asked_for_another = drafter.get("method") not in (None, *DRAFTED_BY_HEAD)
    if released is None or asked_for_another:
        return drafter
    return {"model": released.head, **drafter}


def plan_drafting(
    drafter: Mapping[str, Any], target: Target, *, max_model_len: int | None
) -> VllmDrafter | None:
    """`drafter` has the keys of a speculative_config, ours or vLLM's own, which go through."""
    if not drafter or drafter.get("method") == "none":
        return None
    if "verification" in drafter:
        raise ConfigError(
            "vLLM has no option verification: it verifies drafts of sampled requests by rejection",
            hint="drop it, or use the embedded engine",
        )
    if drafter.get("num_draft_nodes") is not None:
        raise ConfigError("vLLM verifies chains of drafts", hint="drop num_draft_nodes")
    if drafter.get("speculation") == "auto":
        raise ConfigError("vLLM verifies a fixed number of drafts", hint="drop speculation auto")
    drafter = {key: value for key, value in drafter.items() if key != "speculation"}
    by_head = drafter.get("method") in (None, *DRAFTED_BY_HEAD)
    if not by_head:  # n-gram, and what vLLM knows beside
        return VllmDrafter(config={"num_speculative_tokens": DEFAULT_SPECULATIVE_TOKENS, **drafter})
    if drafter.get("model") is None:
        raise ConfigError("this kind of speculation needs a head", hint="give --spec-model HEAD")
    return _with_head(drafter, find_head(drafter["model"]), target, max_model_len)


def _with_head(
    drafter: Mapping[str, Any], head: Head, target: Target, max_model_len: int | None
) -> VllmDrafter:
    check_fits(head, target)
    parallel = _kind(drafter, head) == "p-eagle"
    tokens = _tokens(drafter, head)
    export = plan_export(head, target) if head.native else None
    config = {
        "method": "eagle3",  # vLLM's name for both kinds
        "model": str(export.out) if export else head.reference,
        "num_speculative_tokens": tokens,
        **({"parallel_drafting": True} if parallel else {}),
    }
    return VllmDrafter(
        config=config | {key: value for key, value in drafter.items() if key not in config},
        # A pass holds the K+1 tokens of the last step, accepted or padding, and K-1 mask rows.
        rows_per_request=2 * tokens if parallel else None,
        export=export,
        adds_windows=has_windows(head.config) and not has_windows(target.config),
        notes=tuple(_notes(head, target, max_model_len)),
    )


def has_windows(config: Mapping[str, Any] | None) -> bool:
    """Of a head or a target, in any layout; False where nobody has read it."""
    config = config or {}
    for part in ("transformer_layer_config", "text_config"):
        config = config.get(part, config)
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _kind(drafter: Mapping[str, Any], head: Head) -> str:
    asked = drafter.get("method")
    if asked == "eagle3" and drafter.get("parallel_drafting"):
        asked = "p-eagle"  # vLLM's way to say it
    if head.kind is None and asked is None:
        raise ConfigError(
            f"the name {head.reference} does not say what kind of head it is",
            hint="add --spec-method p-eagle or --spec-method eagle3",
        )
    if head.kind is not None and asked not in (None, head.kind):
        raise ConfigError(
            f"{head.reference} is a {head.kind} head, but the method is {asked}",
            hint=f"use --spec-method {head.kind}, or drop it",
        )
    return str(asked or head.kind)


def _tokens(drafter: Mapping[str, Any], head: Head) -> int:
    given = drafter.get("num_speculative_tokens")
    advised = head.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS
    tokens = advised if given is None else given
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"num_speculative_tokens={tokens!r} is out of range", hint="use >= 1")
    deepest = head.max_speculative_tokens
    if deepest is not None and tokens > deepest:
        raise ConfigError(
            f"num_speculative_tokens={tokens}, but {head.reference} was trained for {deepest}",
            hint=f"use --spec-tokens {deepest} or less",
        )
    return tokens


def _notes(head: Head, target: Target, max_model_len: int | None) -> Iterator[str]:
    released = released_with_head(head.reference)
    if released and not released.confirmed:
        yield (
            f"the id {head.reference} and its K could not be confirmed, no card was found: "
            "--spec-model and --spec-tokens override them"
        )
    known = (head.config or {}).get("max_position_embeddings")
    served = max_model_len or (target.config or {}).get("max_position_embeddings")
    if known and served and known < served and not head.native:  # an export knows them all
        yield f"the head knows {known} positions of {served}: vLLM may not draft beyond them"


def plan_export(head: Head, target: Target) -> Export:
    """Where the export of this head for this target lies; another version of either, elsewhere."""
    digest = hashlib.sha256("\0".join(_identity(Path(head.reference), target)).encode())
    name = f"{Path(head.reference).name}-{digest.hexdigest()[:16]}"
    return Export(
        head=head.reference,
        target=target.served_name or target.reference,
        out=cache_folder() / "exports" / name,
    )


def _identity(head: Path, target: Target) -> Iterator[str]:
    yield peagle.__version__
    yield from (sha256_of(head / name) for name in (CONFIG, WEIGHTS) if (head / name).is_file())
    yield target.given
    if target.given in BUILTIN_MODELS:
        yield BUILTIN_MODELS[target.given].gguf_sha256
    elif target.config is not None:  # a folder: its tables go into the export
        for file in weight_files(Path(target.reference)):
            status = file.stat()
            yield f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"

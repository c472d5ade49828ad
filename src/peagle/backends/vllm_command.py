"""The `vllm serve` line for a target, a drafter and options: built without starting anything."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.backends.released import ReleasedModel, find_released
from peagle.backends.vllm_drafting import Drafting, plan_drafting, with_released_head
from peagle.backends.vllm_exports import Export
from peagle.backends.vllm_models import find_target
from peagle.backends.vllm_options import VllmOptions
from peagle.checkpoints.builtin import Progress

MAX_NUM_SEQS = 128  # beside P-EAGLE, where nobody says: as in the released heads' cards


@dataclass(frozen=True, kw_only=True)
class VllmCommand:
    """What to run, and what has to be there before."""

    target: str
    arguments: tuple[str, ...]  # all that follows the target
    export: Export | None = None
    local_head: Path | None = None  # one that goes to vLLM as it is
    notes: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return shlex.join(("vllm", "serve", self.target, *self.arguments))


def build_command(
    model: str,
    *,
    drafter: Mapping[str, Any],
    options: VllmOptions,
    extra: Sequence[str] = (),
    fetch: bool = False,
    progress: Progress | None = None,
) -> VllmCommand:
    """`drafter` holds the keys of a speculative_config that were given, {} if none was.

    A model of the released table brings its head and options along. What is given wins over it,
    and `extra`, words for vLLM alone, over both.
    """
    released = find_released(model)
    target = find_target(model, fetch=fetch, progress=progress)
    wanted = with_released_head(drafter, released)
    drafting = plan_drafting(wanted, target, max_model_len=options.max_model_len)
    words: list[str] = []
    if target.served_name:
        words += ["--served-model-name", target.served_name]
    if drafting:
        words += ["--speculative-config", json.dumps(drafting.config)]
    for name, value in merge_options(options, released, drafting).given().items():
        words += _flag(name, value, unless=extra)
    return VllmCommand(
        target=target.reference,
        arguments=(*words, *extra),
        export=drafting.export if drafting else None,
        local_head=local_head(drafting),
        notes=drafting.notes if drafting else (),
    )


def local_head(drafting: Drafting | None) -> Path | None:
    """A head on this machine that goes to vLLM as it is."""
    if drafting is None or drafting.export is not None:
        return None
    head = drafting.config.get("model")
    return Path(head) if head is not None and Path(head).is_dir() else None


def merge_options(
    options: VllmOptions, released: ReleasedModel | None, drafting: Drafting | None
) -> VllmOptions:
    """What is given over what the table says, and graphs that fit the drafter's rows."""
    table = released.options if released else VllmOptions()
    if drafting is None or drafting.rows_per_request is None or options.pipeline_parallel_size:
        table = replace(table, async_scheduling=None)  # the cards mean it for their own head
    merged = replace(table, **options.given())
    if drafting is None or drafting.rows_per_request is None:
        return replace(merged, max_cudagraph_capture_size=options.max_cudagraph_capture_size)
    num_seqs = merged.max_num_seqs or MAX_NUM_SEQS
    # vLLM's own limit of 512 rows (1024 on Blackwell) would leave full batches without a graph.
    fitting = max(drafting.rows_per_request * num_seqs, table.max_cudagraph_capture_size or 0)
    captured = options.max_cudagraph_capture_size or (None if merged.enforce_eager else fitting)
    return replace(merged, max_num_seqs=num_seqs, max_cudagraph_capture_size=captured)


def _flag(name: str, value: Any, *, unless: Sequence[str]) -> Iterator[str]:
    """The words of one option, or none if the user's own words say it."""
    flag = name.replace("_", "-")
    if {f"--{flag}", f"--no-{flag}"} & {_flag_name(word) for word in unless}:
        return
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    else:
        yield from (f"--{flag}", str(value))


def _flag_name(word: str) -> str:
    return word.split("=")[0].replace("_", "-")

"""References and our options -> what vLLM is started with: the arguments of its engine, or the
`vllm serve` line. Starts nothing and does not import vLLM."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.backends.vllm.drafting import Export, VllmDrafter, plan_drafting, with_released_head
from peagle.backends.vllm.models import Target, find_target
from peagle.backends.vllm.options import VllmOptions
from peagle.backends.vllm.released import ReleasedModel, find_released
from peagle.checkpoints.files import read_json
from peagle.checkpoints.heads.layouts import CONFIG
from peagle.checkpoints.references import resolve_model
from peagle.config import EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError
from peagle.sampling_params import MAX_LOGPROBS

MAX_NUM_SEQS = 128  # beside P-EAGLE, where nobody says: as in the released heads' cards
SMALLEST_BUDGET = 2048  # vLLM's own default is this or more, by device


@dataclass(frozen=True, kw_only=True)
class VllmEngineArguments:
    """What an engine is started with, and what it means to us."""

    model_path: Path
    method: str  # ours: vLLM calls p-eagle and eagle3 the same
    num_speculative_tokens: int  # 0: no drafter
    options: VllmOptions
    keywords: Mapping[str, Any]  # of vllm.EngineArgs


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    """What a server of vLLM's is told, be it by flags or by a container's environment."""

    target: Target
    drafting: VllmDrafter | None
    options: VllmOptions

    @property
    def arguments(self) -> dict[str, Any]:
        """By vLLM's names; a switch is a bool."""
        told: dict[str, Any] = {}
        if self.target.served_name:
            told["served_model_name"] = self.target.served_name
        if self.drafting:
            told["speculative_config"] = json.dumps(self.drafting.config)
        return told | self.options.given()


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


def engine_arguments(
    model: str, engine: EngineConfig, drafter: SpeculativeConfig | None, options: VllmOptions
) -> VllmEngineArguments:
    """Exports a native head first, since vLLM cannot read it."""
    refuse_what_one_process_cannot(engine, options)
    released = find_released(model)
    target = find_target(model, fetch=True)
    folder = resolve_model(target.reference)  # a Hugging Face id is fetched here
    target = replace(target, reference=str(folder), config=read_json(folder / CONFIG))
    options = replace(_asked_of(engine), **options.given())
    drafting = plan_drafting(_given(drafter), target, max_model_len=options.max_model_len)
    if drafting is not None:
        _prepare_head(drafting, folder)
    options = _with_room(merge_options(options, released, drafting), drafting)
    return VllmEngineArguments(
        model_path=folder,
        method=_method(drafting),
        num_speculative_tokens=_num_tokens(drafting),
        options=options,
        keywords=_keywords(folder, options, drafting),
    )


def _prepare_head(drafting: VllmDrafter, target: Path) -> None:
    """Exports a native head; checks another that lies on this machine."""
    if drafting.export is not None:
        drafting.export.run()
        return
    if head := local_head(drafting):
        from peagle.checkpoints.heads.checks import check_head

        check_head(head, target)


def refuse_what_one_process_cannot(engine: EngineConfig, options: VllmOptions) -> None:
    if engine.device != "auto":
        raise ConfigError(
            f"device={engine.device!r}: vLLM takes the device that it was built for",
            hint="drop it; CUDA_VISIBLE_DEVICES chooses among GPUs",
        )
    if engine.batch_invariant:
        raise ConfigError(
            "batch_invariant is an option of the embedded engine",
            hint="drop it; vLLM reads VLLM_BATCH_INVARIANT=1",
        )
    if (options.data_parallel_size or 1) > 1:
        raise ConfigError(
            f"data_parallel_size={options.data_parallel_size} needs vLLM's server: "
            "an engine in this process is one copy of the model",
            hint="peagle serve --backend vllm, then prepare against its URL",
        )


def _asked_of(engine: EngineConfig) -> VllmOptions:
    """What both engines know and the caller chose: our own defaults are for our own engine."""
    names = (
        *("dtype", "seed", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        *("quantization", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    )
    chosen = {name: getattr(engine, name) for name in names}
    defaults = EngineConfig()
    return VllmOptions(**{n: v for n, v in chosen.items() if v != getattr(defaults, n)})


def _given(drafter: SpeculativeConfig | None) -> dict[str, Any]:
    """The keys vLLM knows too. It always verifies by rejection, so `verification` stays here."""
    if drafter is None:
        return {}
    given = {
        "method": drafter.method,
        "model": drafter.model,
        "num_speculative_tokens": drafter.num_speculative_tokens,
        "num_draft_nodes": drafter.num_draft_nodes,
        "speculation": drafter.speculation,
    }
    if drafter.method == "ngram":
        given["prompt_lookup_max"] = drafter.prompt_lookup_max
        given["prompt_lookup_min"] = drafter.prompt_lookup_min
    return {name: value for name, value in given.items() if value is not None}


def _with_room(options: VllmOptions, drafting: VllmDrafter | None) -> VllmOptions:
    """A step's budget must hold every request's drafter rows, or some requests wait."""
    if drafting is None or drafting.rows_per_request is None:
        return options
    needed = drafting.rows_per_request * (options.max_num_seqs or 1)
    budget = options.max_num_batched_tokens or SMALLEST_BUDGET
    return options if needed <= budget else replace(options, max_num_batched_tokens=needed)


def _keywords(folder: Path, options: VllmOptions, drafting: VllmDrafter | None) -> dict[str, Any]:
    keywords: dict[str, Any] = {
        "model": str(folder),
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": False,  # the counters of acceptance hang on it
        **options.given(),
    }
    if drafting is not None:
        keywords["speculative_config"] = dict(drafting.config)
        keywords["per_request_spec_decode_metrics"] = "detailed"
    return keywords


def _method(drafting: VllmDrafter | None) -> str:
    if drafting is None:
        return "none"
    return "p-eagle" if drafting.config.get("parallel_drafting") else str(drafting.config["method"])


def _num_tokens(drafting: VllmDrafter | None) -> int:
    return int(drafting.config["num_speculative_tokens"]) if drafting else 0


def build_command(
    model: str,
    *,
    drafter: Mapping[str, Any],
    options: VllmOptions,
    extra: Sequence[str] = (),
    fetch: bool = False,
) -> VllmCommand:
    """The line for `plan_server`'s server; `extra`, words for vLLM alone, wins over all."""
    server = plan_server(model, drafter=drafter, options=options, fetch=fetch)
    words: list[str] = []
    for name, value in server.arguments.items():
        words += _flag(name, value, unless=extra)
    drafting = server.drafting
    return VllmCommand(
        target=server.target.reference,
        arguments=(*words, *extra),
        export=drafting.export if drafting else None,
        local_head=local_head(drafting),
        notes=drafting.notes if drafting else (),
    )


def plan_server(
    model: str,
    *,
    drafter: Mapping[str, Any],
    options: VllmOptions,
    fetch: bool = False,
) -> VllmServer:
    """`drafter` holds the keys of a speculative_config that were given, {} if none was.

    A model of the released table brings its head and options along; what is given wins over it.
    """
    released = find_released(model)
    target = find_target(model, fetch=fetch)
    wanted = with_released_head(drafter, released)
    drafting = plan_drafting(wanted, target, max_model_len=options.max_model_len)
    merged = merge_options(options, released, drafting)
    return VllmServer(target=target, drafting=drafting, options=merged)


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


def local_head(drafting: VllmDrafter | None) -> Path | None:
    """A head on this machine that goes to vLLM as it is."""
    if drafting is None or drafting.export is not None:
        return None
    head = drafting.config.get("model")
    return Path(head) if head is not None and Path(head).is_dir() else None


def merge_options(
    options: VllmOptions, released: ReleasedModel | None, drafting: VllmDrafter | None
) -> VllmOptions:
    """What is given over what the table says, and graphs that fit the drafter's rows."""
    table = released.options if released else VllmOptions()
    if drafting is None or drafting.rows_per_request is None or options.pipeline_parallel_size:
        table = replace(table, async_scheduling=None)  # the cards mean it for their own head
    if drafting is not None and drafting.adds_windows:
        # vLLM would cut the target's layers into groups as small as the head, each with a block
        # table and metadata of its own in every step.
        table = replace(table, disable_hybrid_kv_cache_manager=True)
    merged = replace(table, **options.given())
    if drafting is None or drafting.rows_per_request is None:
        return replace(merged, max_cudagraph_capture_size=options.max_cudagraph_capture_size)
    num_seqs = merged.max_num_seqs or MAX_NUM_SEQS
    # vLLM's own limit of 512 rows (1024 on Blackwell) would leave full batches without a graph.
    fitting = max(drafting.rows_per_request * num_seqs, table.max_cudagraph_capture_size or 0)
    captured = options.max_cudagraph_capture_size or (None if merged.enforce_eager else fitting)
    return replace(merged, max_num_seqs=num_seqs, max_cudagraph_capture_size=captured)
